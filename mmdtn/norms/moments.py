"""Moments of tokens in their neighbourhood, as functions without state.

Shapes: ``B`` images, an ``H x W`` grid of tokens, ``C = K * c`` channels in ``K`` heads; pooling makes ``h x w`` cells
``s`` tokens a side. The softmax behind P scores a sum of a function of dx and a function of dy over a full
rectangle, so P is the product of one kernel along each axis, and no ``T x T`` tensor is ever needed.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor


def axis_kernel(position: Tensor, size: int, axis: int) -> Tensor:
    """``K x size x size``: softmax_j(a_1 d^2 + a_axis d) for d = j - i, where ``axis`` is 1 (horizontal) or 2."""
    shift = _shifts(size, position.device)
    score = position[:, 0, None, None] * (shift * shift) + position[:, axis, None, None] * shift
    return _computed_once(F.threshold(score.softmax(-1), 1e-30, 0.0))  # denormal factors cost CPUs a hundred times more


def axis_kernel_backward(kernel: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of a_1 and a_axis, ``K`` each, from the gradient of the kernel."""
    shift = _shifts(kernel.shape[-1], kernel.device)
    grad_score = kernel * (grad - (grad * kernel).sum(-1, keepdim=True))
    return (grad_score * (shift * shift)).sum((1, 2)), (grad_score * shift).sum((1, 2))


def _computed_once(t: Tensor) -> Tensor:
    """Inductor may compute an expression anew for each of the many sums that read it, but not behind ``as_strided``."""
    return t.as_strided(t.shape, t.stride()) if torch.compiler.is_compiling() else t


def _shifts(size: int, device: torch.device) -> Tensor:
    index = torch.arange(size, device=device)  # integers: Inductor fails on differences of a floating arange
    return index[None] - index[:, None]


def split(tokens: Tensor, side: int) -> tuple[Tensor, Tensor | None]:
    """``B x H x W x C`` in cells of ``side`` tokens: ``B x h x s x w x s x C``.

    Where ``side`` does not divide the grid, zeros fill the last cells, and a mask ``1 x h x s x w x s x 1`` comes along
    that is 1 for the tokens that are really there.
    """
    batch, height, width, channels = tokens.shape
    h, w = -(-height // side), -(-width // side)
    if height % side == 0 and width % side == 0:
        return tokens.view(batch, h, side, w, side, channels), None
    padding = (0, 0, 0, w * side - width, 0, h * side - height)
    present = F.pad(tokens.new_ones(1, height, width, 1), padding).view(1, h, side, w, side, 1)
    return F.pad(tokens, padding).view(batch, h, side, w, side, channels), present


def merge(cells: Tensor, height: int, width: int) -> Tensor:
    """The inverse of ``split``."""
    batch, h, side, w, _, channels = cells.shape
    return cells.view(batch, h * side, w * side, channels)[:, :height, :width]


def cell_sum(tokens: Tensor) -> Tensor:
    """``B x h x s x w x s x C``, summed over each cell: ``B x h x 1 x w x 1 x C``."""
    batch, h, side, w, _, channels = tokens.shape
    if side == 1:
        return tokens
    if torch.compiler.is_compiling():
        return tokens.sum((2, 4), keepdim=True)
    # Pooling reads channels-last memory once; in eager a sum over two separate dimensions is many times slower.
    image = tokens.view(batch, h * side, w * side, channels).permute(0, 3, 1, 2)
    return F.avg_pool2d(image, side, divisor_override=1).permute(0, 2, 3, 1).view(batch, h, 1, w, 1, channels)


# Two maps of B x h x w x K x c that P is applied to together. Eager code has them in one tensor, 2 x B x h x w x K x c,
# whose memory is laid out for matrix products. Compiled code keeps them apart and applies P by a broadcast multiply and
# a sum, which Inductor fuses with the statistics around it; with open sizes it does not get through the matrix layouts.
Pair = Tensor | tuple[Tensor, Tensor]
COLUMNS, ROWS = 2, 3  # the dimension of a pair that a product along them sums over


def make_pair(values: Tensor, shift: Tensor, second: Tensor | None) -> Pair:
    """``(v, second)`` for ``v = values - shift``; without a second ``(v, v^2)``."""
    if torch.compiler.is_compiling():
        first = _computed_once(values - shift)
        return first, first * first if second is None else second
    batch, h, w, heads, c = values.shape
    pair = _as_pair(values.new_empty(heads, w, h * 2 * batch * c), (2, *values.shape), ROWS)
    first = into(pair[0], torch.sub, values, shift)
    if second is None:
        into(pair[1], torch.mul, first, first)
    else:
        pair[1].copy_(second)
    return pair


def mix(rows: Tensor, columns: Tensor, pair: Pair) -> tuple[Pair, Pair]:
    """P applied to a pair, by its kernels along the rows and the columns of the grid.

    Returns the mixed pair and the pair mixed along rows only, which ``mix_backward`` wants.
    """
    if not isinstance(pair, Tensor):
        first, second = _sum_along_rows(rows, pair[0]), _sum_along_rows(rows, pair[1])
        return (_sum_along_columns(columns, first), _sum_along_columns(columns, second)), (first, second)
    by_row = _matrices(pair, ROWS)
    product = _as_pair(torch.bmm(rows, by_row), pair.shape, ROWS)
    mixed_rows = _as_pair(torch.empty_like(by_row), pair.shape, COLUMNS).copy_(product)
    by_column = _matrices(mixed_rows, COLUMNS)
    mixed = into(_matrices(product, ROWS).view_as(by_column), torch.bmm, columns, by_column)
    return _as_pair(mixed, pair.shape, COLUMNS), mixed_rows


def mix_backward(
    rows: Tensor, columns: Tensor, pair: Pair, mixed_rows: Pair, grad: Pair
) -> tuple[Tensor, Tensor, Pair]:
    """Gradients of ``rows``, ``columns`` and ``pair`` from that of the mixed pair. Overwrites the last two."""
    if not (isinstance(pair, Tensor) and isinstance(mixed_rows, Tensor) and isinstance(grad, Tensor)):
        return _mix_backward_broadcast(rows, columns, pair, mixed_rows, grad)
    by_column, inputs = _matrices(grad, COLUMNS), _matrices(mixed_rows, COLUMNS)
    grad_columns = torch.bmm(by_column, inputs.mT)
    product = into(inputs, torch.bmm, columns.mT, by_column)
    by_row = _matrices(_as_pair(by_column, pair.shape, ROWS).copy_(_as_pair(product, pair.shape, COLUMNS)), ROWS)
    grad_rows = torch.bmm(by_row, _matrices(pair, ROWS).mT)
    grad_pair = into(product.view_as(by_row), torch.bmm, rows.mT, by_row)
    return grad_rows, grad_columns, _as_pair(grad_pair, pair.shape, ROWS)


def into(memory: Tensor, operation: Callable, *operands: Tensor) -> Tensor:
    """The result of an operation, in memory that is at hand: most of the time of eager code goes into fresh memory."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing():  # graphs know no out=, nor does autograd in a trace
        return memory.copy_(operation(*operands))
    return operation(*operands, out=memory)


def _matrices(pair: Tensor, axis: int) -> Tensor:
    """A pair as the matrices ``K x n x m`` that kernels along ``axis`` multiply; in its memory if laid out so."""
    return pair.permute(4, axis, 5 - axis, 0, 1, 5).reshape(pair.shape[4], pair.shape[axis], -1)


def _as_pair(matrices: Tensor, shape: tuple[int, ...], axis: int) -> Tensor:
    """The inverse of ``_matrices``, in the same memory."""
    two, batch, _, _, heads, c = shape
    order = (3, 4, 1, 2, 0, 5) if axis == COLUMNS else (3, 4, 2, 1, 0, 5)
    return matrices.view(heads, shape[axis], shape[5 - axis], two, batch, c).permute(order)


def _mix_backward_broadcast(rows, columns, pair, mixed_rows, grad):
    grad = [_computed_once(g) for g in grad]
    grad_columns = _kernel_grad([t.transpose(1, 2) for t in grad], [t.transpose(1, 2) for t in mixed_rows])
    grad = _sum_along_columns(columns.mT, grad[0]), _sum_along_columns(columns.mT, grad[1])
    grad_rows = _kernel_grad(grad, pair)
    return grad_rows, grad_columns, (_sum_along_rows(rows.mT, grad[0]), _sum_along_rows(rows.mT, grad[1]))


def _kernel_grad(grad, maps):
    """``K x w x w`` from a pair of ``B x h x w x K x c`` each. Inductor is three times faster with c summed first."""
    first, second = ((g[:, :, :, None] * m[:, :, None]).sum(5) for g, m in zip(grad, maps, strict=True))
    return (first + second).sum((0, 1)).permute(2, 0, 1)


def _sum_along_rows(kernel: Tensor, maps: Tensor) -> Tensor:
    return (maps[:, :, None] * kernel.permute(1, 2, 0)[..., None]).sum(3)


def _sum_along_columns(kernel: Tensor, maps: Tensor) -> Tensor:
    return (maps[:, None] * kernel.permute(1, 2, 0)[:, :, None, :, None]).sum(2)
