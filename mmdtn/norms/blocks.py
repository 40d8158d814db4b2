"""P in graphs: sums along the rows, which Inductor fuses with the rest, and matrix products along the columns.

They work on blocks, ``B x K x h x w x c``: a head of an image in one piece of memory, which caches hold. In maps,
``B x h x w x K x c``, neighbours lie kilobytes apart, and sums wait for memory, up to four times as long.
"""

import torch
from torch import Tensor

from .inductor import computed_once
from .kernels import position_gradient, slopes

Maps = tuple[Tensor, Tensor]


def make_pair(values: Tensor, shift: Tensor, second: Tensor | None) -> Maps:
    """``(v, v^2)`` for ``v = values - shift``, plus a second: maps with the memory of blocks."""
    first = _as_blocks(values - shift)
    return first, first * first if second is None else first * first + _as_blocks(second)


def mix(rows: Tensor, columns: Tensor, pair: Maps) -> tuple[Maps, Maps]:
    """The pair mixed along rows and columns, and mixed along rows only."""
    first, second = (computed_once(_along_rows(rows, _blocks(t))) for t in pair)
    mixed = _maps(_along_columns(columns, first)), _maps(_along_columns(columns, second))
    return mixed, (_maps(first), _maps(second))


def mix_backward(rows: Tensor, columns: Tensor, pair: Maps, mixed_rows: Maps, grad: Maps) -> tuple[Tensor, Maps]:
    """Gradients of the ``K x 3`` position and of the pair from that of the mixed pair."""
    first, second = (_blocks(_as_blocks(t)) for t in grad)
    of_columns = _kernel_gradient(first, _blocks(mixed_rows[0])) + _kernel_gradient(second, _blocks(mixed_rows[1]))
    first, second = _along_columns(columns.mT, first), _along_columns(columns.mT, second)
    of_rows = _of_slopes_of_rows(rows, (first, second), [_blocks(t) for t in pair])
    grad_position = position_gradient(of_rows, (slopes(columns) * of_columns).sum((2, 3)))
    return grad_position, (_maps(_along_rows(rows.mT, first)), _maps(_along_rows(rows.mT, second)))


def _along_rows(kernel: Tensor, blocks: Tensor) -> Tensor:
    if not torch.compiler.is_compiling() or torch.compiler.is_exporting():  # unfused, the sum is slow and large
        return _along_columns(kernel, blocks.transpose(2, 3)).transpose(2, 3)
    return (blocks[:, :, :, None] * kernel[:, None, :, :, None]).sum(4)


def _along_columns(kernel: Tensor, blocks: Tensor) -> Tensor:
    return computed_once(torch.matmul(kernel, blocks.flatten(3)).view_as(blocks))


def _kernel_gradient(grad: Tensor, blocks: Tensor) -> Tensor:
    return torch.matmul(grad.flatten(3), blocks.flatten(3).mT).sum(0)


def _of_slopes_of_rows(kernel: Tensor, grad: Maps, blocks: list[Tensor]) -> Tensor:
    """``2 x K``. As one sum over two dimensions it leaves nothing large in memory."""
    first, second = (g[:, :, :, :, None] * t[:, :, :, None] for g, t in zip(grad, blocks, strict=True))
    sums = (((first + second) * slope[:, None, :, :, None]).sum((3, 4)) for slope in slopes(kernel))
    return torch.stack([t.sum((0, 2, 3)) for t in sums])


def _as_blocks(maps: Tensor) -> Tensor:
    return _maps(computed_once(_blocks(maps).contiguous()))


def _blocks(maps: Tensor) -> Tensor:
    return maps.permute(0, 3, 1, 2, 4)


def _maps(blocks: Tensor) -> Tensor:
    return blocks.permute(0, 2, 3, 1, 4)
