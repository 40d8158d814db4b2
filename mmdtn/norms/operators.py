"""What compilers shall not look into.

P on large grids: the matrix products of ``separable``. With open sizes Inductor does not get through their layouts.
And tensors of the backward pass: in the graph of a whole model, what it computes again would be kept instead.
"""

import torch
from torch import Tensor

from . import separable
from .separable import COLUMNS, ROWS, as_pair, laid_out

Maps = tuple[Tensor, Tensor]


def make_pair(values: Tensor, shift: Tensor, second: Tensor | None) -> Tensor:
    """``(v, v^2)`` for ``v = values - shift``, plus a second."""
    first = values - shift
    return _stacked(first, first * first if second is None else first * first + second, ROWS)


def mix(rows: Tensor, columns: Tensor, pair: Tensor) -> tuple[Maps, Tensor]:
    """The pair mixed along rows and columns, and mixed along rows only."""
    mixed, mixed_rows = _mix(rows, columns, pair)
    return (mixed[0], mixed[1]), mixed_rows


def mix_backward(rows: Tensor, columns: Tensor, pair: Tensor, mixed_rows: Tensor, grad: Maps) -> tuple[Tensor, Tensor]:
    """Gradients of the ``K x 3`` position and of the pair from that of the mixed pair."""
    return _mix_backward(rows, columns, pair, mixed_rows, _stacked(*grad, COLUMNS))


@torch.library.custom_op('mmdtn::mix', mutates_args=())
def _mix(rows: Tensor, columns: Tensor, pair: Tensor) -> tuple[Tensor, Tensor]:
    return separable.mix(rows, columns, pair)


@_mix.register_fake
def _(rows: Tensor, columns: Tensor, pair: Tensor) -> tuple[Tensor, Tensor]:
    return laid_out(pair, COLUMNS), laid_out(pair, COLUMNS)


@torch.library.custom_op('mmdtn::mix_backward', mutates_args=())
def _mix_backward(
    rows: Tensor, columns: Tensor, pair: Tensor, mixed_rows: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor]:
    return separable.mix_backward(rows, columns, pair, mixed_rows, grad, overwrite=False)


@_mix_backward.register_fake
def _(rows: Tensor, columns: Tensor, pair: Tensor, mixed_rows: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    return rows.new_empty(rows.shape[0], 3), laid_out(pair, ROWS)


@torch.library.custom_op('mmdtn::after', mutates_args=())
def after(grad: Tensor, saved: Tensor) -> Tensor:
    """A copy of what was saved. What follows from it seems to need the gradient, so it is not computed before."""
    return saved.clone()


@after.register_fake
def _(grad: Tensor, saved: Tensor) -> Tensor:
    return torch.empty_like(saved)


def _stacked(first: Tensor, second: Tensor, axis: int) -> Tensor:
    """Two maps as a pair whose memory is laid out for products along ``axis``."""
    matrices = torch.stack([t.permute(0, 3, axis - 1, 4 - axis, 4) for t in (first, second)], 3)
    return as_pair(matrices, axis)
