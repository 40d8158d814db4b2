"""P, the softmax over all pairs of cells, as one kernel along each axis of the grid.

The softmax scores a sum of a function of dx and a function of dy over a full rectangle, so P is the product of the two
kernels, and no ``T x T`` tensor is ever needed. Shapes: ``B`` images, ``h x w`` cells, ``C = K * c`` channels in ``K``
heads. Functions without state.
"""

import torch
from torch import Tensor

from . import sums
from .kernels import position_gradient, slopes
from .memory import into
from .products import kernel_gradient, multiply

# Two maps of B x h x w x K x c that P is applied to together. For matrix products they are one tensor,
# 2 x B x h x w x K x c, whose memory eager code lays out for them. Compiled code has them apart where grids are small,
# and applies P by sums.
Pair = Tensor | tuple[Tensor, Tensor]
COLUMNS, ROWS = 2, 3  # the dimension of a pair that a product along them sums over


def make_pair(values: Tensor, shift: Tensor, second: Tensor | None, by_products: bool) -> Pair:
    """``(v, second)`` for ``v = values - shift``; without a second ``(v, v^2)``."""
    if not by_products:
        first = sums.as_blocks(values - shift)
        return first, first * first if second is None else sums.as_blocks(second) + first * first
    if torch.compiler.is_compiling():
        first = values - shift
        return _stacked(first, first * first if second is None else first * first + second, ROWS)
    pair = _laid_out(values.expand(2, *values.shape), ROWS)
    first = into(pair[0], torch.sub, values, shift)
    squares = into(pair[1], torch.mul, first, first)
    if second is not None:
        squares.add_(second)
    return pair


def mix(rows: Tensor, columns: Tensor, pair: Pair) -> tuple[Pair, Pair]:
    """P applied to a pair, by its kernels along the rows and the columns of the grid.

    Returns the mixed pair and the pair mixed along rows only, which ``mix_backward`` wants.
    """
    if isinstance(pair, Tensor):
        if not torch.compiler.is_compiling():
            return _mix(rows, columns, pair)
        mixed, mixed_rows = _mix_op(rows, columns, pair)
        return (mixed[0].clone(), mixed[1].clone()), mixed_rows  # what is done to one in place leaves the other alone
    return sums.mix(rows, columns, pair)


def mix_backward(rows: Tensor, columns: Tensor, pair: Pair, mixed_rows: Pair, grad: Pair) -> tuple[Tensor, Pair]:
    """Gradients of the ``K x 3`` position and of the pair from that of the mixed pair. Overwrites the last two."""
    if isinstance(pair, Tensor) and isinstance(mixed_rows, Tensor):
        if isinstance(grad, Tensor):
            return _mix_backward(rows, columns, pair, mixed_rows, grad, overwrite=True)
        return _mix_backward_op(rows, columns, pair, mixed_rows, _stacked(grad[0], grad[1], COLUMNS))
    assert isinstance(pair, tuple) and isinstance(mixed_rows, tuple) and isinstance(grad, tuple)
    return sums.mix_backward(rows, columns, pair, mixed_rows, grad)


def _mix(rows: Tensor, columns: Tensor, pair: Tensor) -> tuple[Tensor, Tensor]:
    mixed_rows = _multiply(rows, pair, ROWS, _laid_out(pair, COLUMNS))
    return _multiply(columns, mixed_rows, COLUMNS, _laid_out(pair, COLUMNS)), mixed_rows


def _mix_backward(
    rows: Tensor, columns: Tensor, pair: Tensor, mixed_rows: Tensor, grad: Tensor, overwrite: bool
) -> tuple[Tensor, Tensor]:
    grad_columns = kernel_gradient(_matrices(grad, COLUMNS), _matrices(mixed_rows, COLUMNS), columns)
    grad_mixed_rows = _laid_out(pair, ROWS, mixed_rows if overwrite else None)
    _multiply(columns.mT, grad, COLUMNS, grad_mixed_rows)
    grad_rows = kernel_gradient(_matrices(grad_mixed_rows, ROWS), _matrices(pair, ROWS), rows)
    grad_pair = _laid_out(pair, ROWS, grad if overwrite else None)
    _multiply(rows.mT, grad_mixed_rows, ROWS, grad_pair)
    of_rows, of_columns = ((slopes(k) * g).sum((2, 3)) for k, g in ((rows, grad_rows), (columns, grad_columns)))
    return position_gradient(of_rows, of_columns), grad_pair


def _multiply(kernel: Tensor, pair: Tensor, axis: int, result: Tensor) -> Tensor:
    """The kernel of an axis times a pair that is laid out for it, in a result of any layout."""
    multiply(kernel, _matrices(pair, axis), result.permute(_to_matrices(axis)))
    return result


# To Inductor the matrix products are single operators: with open sizes it does not get through their layouts.
@torch.library.custom_op('mmdtn::mix', mutates_args=())
def _mix_op(rows: Tensor, columns: Tensor, pair: Tensor) -> tuple[Tensor, Tensor]:
    return _mix(rows, columns, pair)


@_mix_op.register_fake
def _(rows: Tensor, columns: Tensor, pair: Tensor) -> tuple[Tensor, Tensor]:
    return _laid_out(pair, COLUMNS), _laid_out(pair, COLUMNS)


@torch.library.custom_op('mmdtn::mix_backward', mutates_args=())
def _mix_backward_op(
    rows: Tensor, columns: Tensor, pair: Tensor, mixed_rows: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor]:
    return _mix_backward(rows, columns, pair, mixed_rows, grad, overwrite=False)


@_mix_backward_op.register_fake
def _(rows: Tensor, columns: Tensor, pair: Tensor, mixed_rows: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    return rows.new_empty(rows.shape[0], 3), _laid_out(pair, ROWS)


def _stacked(first: Tensor, second: Tensor, axis: int) -> Tensor:
    """Two maps as a pair whose memory is laid out for products along ``axis``."""
    matrices = torch.stack([t.permute(0, 3, axis - 1, 4 - axis, 4) for t in (first, second)], 3)
    return _as_pair(matrices, axis)


def _laid_out(pair: Tensor, axis: int, memory: Tensor | None = None) -> Tensor:
    """An empty pair for products along ``axis``, in new memory or in that of a pair for products along columns."""
    shape = tuple(pair.shape[i] for i in _to_matrices(axis))
    return _as_pair(pair.new_empty(shape) if memory is None else _matrices(memory, COLUMNS).view(shape), axis)


def _matrices(pair: Tensor, axis: int) -> Tensor:
    """A pair as the matrices ``B x K x n x m`` that kernels along ``axis`` multiply; in its memory if laid out so."""
    return pair.permute(_to_matrices(axis)).flatten(3)


def _to_matrices(axis: int) -> tuple[int, ...]:
    # Images first, as in tokens: each processor then works on images of its own, which stay in its cache.
    return 1, 4, axis, 0, 5 - axis, 5


def _as_pair(matrices: Tensor, axis: int) -> Tensor:
    """The inverse of ``permute(_to_matrices(axis))``."""
    return matrices.permute((3, 0, 2, 4, 1, 5) if axis == COLUMNS else (3, 0, 4, 2, 1, 5))
