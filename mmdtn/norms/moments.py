"""Moments of tokens in their neighbourhood, as functions without state.

Shapes: ``B`` images, an ``H x W`` grid of tokens, ``C = K * c`` channels in ``K`` heads; pooling makes ``h x w`` cells
``s`` tokens a side. The softmax behind P scores a sum of a function of dx and a function of dy over a full
rectangle, so P is the product of one kernel along each axis, and no ``T x T`` tensor is ever needed.
"""

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


# Two maps of B x h x w x K x c that P is applied to together. Eager code has them in one tensor, laid out for matrix
# products, and unpacks it into views. Compiled code keeps them apart and applies P by a broadcast multiply and a sum,
# which Inductor fuses with the statistics around it; with open sizes it does not get through the matrix layouts at all.
Pair = Tensor | tuple[Tensor, Tensor]


def make_pair(values: Tensor, shift: Tensor, variance: Tensor | None) -> Pair:
    """``(v, v^2 + variance)`` for ``v = values - shift``."""
    if torch.compiler.is_compiling():
        first = values - shift
        return first, first * first if variance is None else first * first + variance
    batch, h, w, heads, c = values.shape
    pair = values.new_empty(heads, w, h, batch, 2, c).permute(4, 3, 2, 1, 0, 5)
    first, second = pair
    first.copy_(values).sub_(shift)
    second.copy_(first).mul_(first)
    if variance is not None:
        second.add_(variance)
    return pair


def mix(rows: Tensor, columns: Tensor, pair: Pair) -> tuple[Pair, Pair]:
    """P applied to a pair, by its kernels along the rows and the columns of the grid.

    Returns the mixed pair and the pair mixed along rows only, which ``mix_backward`` wants.
    """
    if not isinstance(pair, Tensor):
        mixed_rows = _sum_along_rows(rows, pair[0]), _sum_along_rows(rows, pair[1])
        return (_sum_along_columns(columns, mixed_rows[0]), _sum_along_columns(columns, mixed_rows[1])), mixed_rows
    two, batch, h, w, heads, c = pair.shape
    by_row = torch.bmm(rows, _rows_first(pair))
    by_column = _swap(by_row, h)
    mixed = _bmm_into(by_row.view(heads, h, -1), columns, by_column)
    as_pair = (heads, h, w, batch, two, c)
    return mixed.view(as_pair).permute(4, 3, 1, 2, 0, 5), by_column.view(as_pair).permute(4, 3, 1, 2, 0, 5)


def mix_backward(
    rows: Tensor, columns: Tensor, pair: Pair, mixed_rows: Pair, grad: Pair
) -> tuple[Tensor, Tensor, Pair]:
    """Gradients of ``rows``, ``columns`` and ``pair`` from that of the mixed pair. Overwrites the last two."""
    if not (isinstance(pair, Tensor) and isinstance(mixed_rows, Tensor) and isinstance(grad, Tensor)):
        return _mix_backward_broadcast(rows, columns, pair, mixed_rows, grad)
    two, batch, h, w, heads, c = pair.shape
    by_column = _columns_first(grad)
    grad_columns = torch.bmm(by_column, _columns_first(mixed_rows).mT)
    grad_by_column = _bmm_into(_columns_first(mixed_rows), columns.mT, by_column)
    by_row = by_column.view(heads, w, -1)
    by_row.view(heads, w, h, -1).copy_(grad_by_column.view(heads, h, w, -1).transpose(1, 2))
    grad_rows = torch.bmm(by_row, _rows_first(pair).mT)
    grad_pair = _bmm_into(grad_by_column.view(heads, w, -1), rows.mT, by_row)
    return grad_rows, grad_columns, grad_pair.view(heads, w, h, batch, two, c).permute(4, 3, 2, 1, 0, 5)


def _bmm_into(spent: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """The product, in memory that is no longer needed; not so in a trace, which may run under autograd."""
    return torch.bmm(left, right) if torch.jit.is_tracing() else torch.bmm(left, right, out=spent)


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


def _rows_first(pair: Tensor) -> Tensor:
    """``2 x B x h x w x K x c`` to the matrices ``K x w x (h B 2 c)``."""
    return pair.permute(4, 3, 2, 1, 0, 5).reshape(pair.shape[4], pair.shape[3], -1)


def _columns_first(pair: Tensor) -> Tensor:
    """``2 x B x h x w x K x c`` to the matrices ``K x h x (w B 2 c)``."""
    return pair.permute(4, 2, 3, 1, 0, 5).reshape(pair.shape[4], pair.shape[2], -1)


def _swap(by_row: Tensor, h: int) -> Tensor:
    """``K x w x (h n)`` to ``K x h x (w n)``, in memory of its own."""
    heads, w, _ = by_row.shape
    return by_row.view(heads, w, h, -1).transpose(1, 2).clone(memory_format=torch.contiguous_format).view(heads, h, -1)
