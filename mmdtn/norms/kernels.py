"""The two factors of P: a softmax along each axis of the grid, for ``K`` heads."""

import torch
import torch.nn.functional as F
from torch import Tensor

from .inductor import computed_once


def both_kernels(position: Tensor, height: int, width: int, identity: bool) -> tuple[Tensor, Tensor]:
    """P along the rows of a grid, and along its columns."""
    if identity:
        rows, columns = (torch.eye(n, dtype=position.dtype, device=position.device) for n in (width, height))
        return rows.expand(len(position), width, width), columns.expand(len(position), height, height)
    return axis_kernel(position, width, axis=1), axis_kernel(position, height, axis=2)


def axis_kernel(position: Tensor, size: int, axis: int) -> Tensor:
    """``K x size x size``: softmax_j(a_1 d^2 + a_axis d) for d = j - i, where ``axis`` is 1 (horizontal) or 2."""
    shift = _shifts(size, position.device)
    score = position[:, 0, None, None] * (shift * shift) + position[:, axis, None, None] * shift
    return computed_once(F.threshold(score.softmax(-1), 1e-30, 0.0))  # denormal factors cost CPUs a hundred times more


def slopes(kernel: Tensor) -> Tensor:
    """``2 x K x n x n``: its derivatives by a_1 and a_axis, P (f - sum_j P f) for f = d^2 and f = d."""
    shift = _shifts(kernel.shape[-1], kernel.device)
    f = torch.stack((shift * shift, shift))[:, None]
    return computed_once(kernel * (f - (kernel * f).sum(-1, keepdim=True)))


def position_gradient(of_rows: Tensor, of_columns: Tensor) -> Tensor:
    """``K x 3`` from ``2 x K`` for each axis: what the slopes of its kernel gather."""
    return torch.stack((of_rows[0] + of_columns[0], of_rows[1], of_columns[1]), 1)


def _shifts(size: int, device: torch.device) -> Tensor:
    index = torch.arange(size, device=device)  # integers: Inductor fails on differences of a floating arange
    return index[None] - index[:, None]
