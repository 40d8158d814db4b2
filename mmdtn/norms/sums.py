"""P by broadcast multiplications and sums: for compiled code on small grids, where Inductor fuses them with the rest.

They work on blocks, ``B x K x m x n x c``: a head of an image in one piece of memory, which caches hold, with the axis
``n`` to sum over next to the channels. In maps, ``B x h x w x K x c``, neighbours lie kilobytes apart, and sums wait
for memory, up to four times as long. Each axis is summed over in turn, and blocks turn with it.
"""

import torch
from torch import Tensor

from .kernels import position_gradient, slopes
from .memory import computed_once

Maps = tuple[Tensor, Tensor]


def as_blocks(maps: Tensor) -> Tensor:
    """Maps with the memory of blocks, for sums along rows."""
    return _maps(computed_once(_blocks(maps).contiguous()))


def mix(rows: Tensor, columns: Tensor, pair: Maps) -> tuple[Maps, Maps]:
    """The pair mixed along rows and columns, and mixed along rows only. The pair comes from ``as_blocks``."""
    first, second = (computed_once(_sum_and_turn(rows, _blocks(t))) for t in pair)
    mixed = _maps(_sum(columns, first), turned=True), _maps(_sum(columns, second), turned=True)
    return mixed, (_maps(first, turned=True), _maps(second, turned=True))


def mix_backward(rows: Tensor, columns: Tensor, pair: Maps, mixed_rows: Maps, grad: Maps) -> tuple[Tensor, Maps]:
    """Gradients of the ``K x 3`` position and of the pair from that of the mixed pair."""
    first, second = (computed_once(_blocks(t, turned=True).contiguous()) for t in grad)
    of_columns = _of_slopes(columns, (first, second), [_blocks(t, turned=True) for t in mixed_rows])
    first, second = (computed_once(_sum_and_turn(columns.mT, t)) for t in (first, second))
    of_rows = _of_slopes(rows, (first, second), [_blocks(t) for t in pair])
    return position_gradient(of_rows, of_columns), (_maps(_sum(rows.mT, first)), _maps(_sum(rows.mT, second)))


def _sum(kernel: Tensor, blocks: Tensor) -> Tensor:
    return (blocks[:, :, :, None] * kernel[:, None, :, :, None]).sum(4)


def _sum_and_turn(kernel: Tensor, blocks: Tensor) -> Tensor:
    """``B x K x n x m x c`` from ``B x K x m x n x c``."""
    return (blocks[:, :, None] * kernel[:, :, None, :, None]).sum(4)


def _of_slopes(kernel: Tensor, grad: Maps, blocks: list[Tensor]) -> Tensor:
    """``2 x K``. As one sum over two dimensions it leaves nothing large in memory."""
    first, second = (g[:, :, :, :, None] * t[:, :, :, None] for g, t in zip(grad, blocks, strict=True))
    sums = (((first + second) * slope[:, None, :, :, None]).sum((3, 4)) for slope in slopes(kernel))
    return torch.stack([t.sum((0, 2, 3)) for t in sums])


def _blocks(maps: Tensor, turned: bool = False) -> Tensor:
    return maps.permute((0, 3, 2, 1, 4) if turned else (0, 3, 1, 2, 4))


def _maps(blocks: Tensor, turned: bool = False) -> Tensor:
    return blocks.permute((0, 3, 2, 1, 4) if turned else (0, 2, 3, 1, 4))
