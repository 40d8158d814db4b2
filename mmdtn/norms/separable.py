"""P, the softmax over all pairs of cells, as one kernel along each axis of the grid.

The softmax scores a sum of a function of dx and a function of dy over a full rectangle, so P is the product of the two
kernels, and no ``T x T`` tensor is ever needed. Shapes: ``B`` images, ``h x w`` cells, ``C = K * c`` channels in ``K``
heads. Functions without state.

P is applied to two maps, ``B x h x w x K x c``, together: a pair, ``2 x B x h x w x K x c``, whose memory is laid out
for matrix products. ``blocks`` and ``operators`` do the same in graphs.
"""

import torch
from torch import Tensor

from .kernels import position_gradient, slopes
from .products import kernel_gradient, multiply

COLUMNS, ROWS = 2, 3  # the dimension of a pair that a product along them sums over


def make_pair(values: Tensor, shift: Tensor, second: Tensor | None) -> Tensor:
    """``(v, v^2)`` for ``v = values - shift``, plus a second."""
    pair = laid_out(values.expand(2, *values.shape), ROWS)
    first = torch.sub(values, shift, out=pair[0])
    squares = torch.mul(first, first, out=pair[1])
    if second is not None:
        squares.add_(second)
    return pair


def mix(rows: Tensor, columns: Tensor, pair: Tensor) -> tuple[Tensor, Tensor]:
    """P applied to a pair, by its kernels along the rows and the columns of the grid.

    Returns the mixed pair and the pair mixed along rows only, which ``mix_backward`` wants.
    """
    mixed_rows = _multiply(rows, pair, ROWS, laid_out(pair, COLUMNS))
    return _multiply(columns, mixed_rows, COLUMNS, laid_out(pair, COLUMNS)), mixed_rows


def mix_backward(
    rows: Tensor, columns: Tensor, pair: Tensor, mixed_rows: Tensor, grad: Tensor, overwrite: bool = True
) -> tuple[Tensor, Tensor]:
    """Gradients of the ``K x 3`` position and of the pair from that of the mixed pair. Overwrites the last two."""
    grad_columns = kernel_gradient(_matrices(grad, COLUMNS), _matrices(mixed_rows, COLUMNS), columns)
    grad_mixed_rows = laid_out(pair, ROWS, mixed_rows if overwrite else None)
    _multiply(columns.mT, grad, COLUMNS, grad_mixed_rows)
    grad_rows = kernel_gradient(_matrices(grad_mixed_rows, ROWS), _matrices(pair, ROWS), rows)
    grad_pair = laid_out(pair, ROWS, grad if overwrite else None)
    _multiply(rows.mT, grad_mixed_rows, ROWS, grad_pair)
    of_rows, of_columns = ((slopes(k) * g).sum((2, 3)) for k, g in ((rows, grad_rows), (columns, grad_columns)))
    return position_gradient(of_rows, of_columns), grad_pair


def laid_out(pair: Tensor, axis: int, memory: Tensor | None = None) -> Tensor:
    """An empty pair for products along ``axis``, in new memory or in that of a pair for products along columns."""
    shape = tuple(pair.shape[i] for i in _to_matrices(axis))
    return as_pair(pair.new_empty(shape) if memory is None else _matrices(memory, COLUMNS).view(shape), axis)


def as_pair(matrices: Tensor, axis: int) -> Tensor:
    """The inverse of ``permute(_to_matrices(axis))``."""
    return matrices.permute((3, 0, 2, 4, 1, 5) if axis == COLUMNS else (3, 0, 4, 2, 1, 5))


def _multiply(kernel: Tensor, pair: Tensor, axis: int, result: Tensor) -> Tensor:
    """The kernel of an axis times a pair that is laid out for it, in a result of any layout."""
    multiply(kernel, _matrices(pair, axis), result.permute(_to_matrices(axis)))
    return result


def _matrices(pair: Tensor, axis: int) -> Tensor:
    """A pair as the matrices ``B x K x n x m`` that kernels along ``axis`` multiply; in its memory if laid out so."""
    return pair.permute(_to_matrices(axis)).flatten(3)


def _to_matrices(axis: int) -> tuple[int, ...]:
    # Images first, as in tokens: each processor then works on images of its own, which stay in its cache.
    return 1, 4, axis, 0, 5 - axis, 5
