"""The reference implementation of DTN in plain torch.

The tests compare every back end with this module, which runs wherever no back end does. The module supports every
device and dtype, derivatives of any order, torch.func, and export with dynamic shapes. Autograd saves about ten times
the size of the input. Variable names follow docs/mathematics.md.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from .interface import Settings, Tensors


def dtn(t: Tensors, s: Settings) -> Tensor:
    """Normalises ``t.x``. Returns a tensor of shape B x H x W x C in the dtype of the weight."""
    z = by_head(t.x.to(t.weight.dtype), len(t.position), s)
    var, mean = torch.var_mean(z, (-2, -1), keepdim=True, correction=int(s.unbiased))
    M, V = neighbourhood(z, t.position, s)
    mean_lambda, var_lambda = t.mean_lambda[:, None], t.var_lambda[:, None]
    mu = mean_lambda * mean + on_tokens((1 - mean_lambda) * M, z, s.pool_size)
    variance = var_lambda * var + on_tokens((1 - var_lambda) * V, z, s.pool_size)
    return ((z - mu) * (variance + s.eps).rsqrt()).flatten(-2) * t.weight + t.bias


def by_head(x: Tensor, heads: int, s: Settings) -> Tensor:
    """Splits the channels into heads. With ``prenorm``, divides each head of each token by its root mean square."""
    z = x.unflatten(-1, (heads, x.shape[-1] // heads))
    return z * (z.square().mean(-1, keepdim=True) + s.eps).rsqrt() if s.prenorm else z


def neighbourhood(z: Tensor, position: Tensor, s: Settings) -> tuple[Tensor, Tensor]:
    """Returns the means and variances of the cells' neighbourhoods, each of shape B x h x w x K x c."""
    # Subtracting each channel's mean over the image leaves the variance unchanged, but keeps E[z^2] - E[z]^2 from
    # losing precision.
    cells = pool(z, s.pool_size)
    shift = cells.mean((1, 2), keepdim=True)
    first = cells - shift
    second = pool((z - shift).square(), s.pool_size) if s.pool_second_moment else first.square()
    columns, rows = (axis_kernel(position, cells.shape[axis], axis, s.identity)[:, None] for axis in (1, 2))
    maps = (t.permute(0, 3, 4, 1, 2) for t in (first, second))
    M, V = ((columns @ Z @ rows.mT).permute(0, 3, 4, 1, 2) for Z in maps)
    V = V - M.square()
    # Negative variances come only from rounding. Clamping to zero keeps their gradients.
    return M + shift, V + (V.clamp(min=0) - V).detach()


def pool(tokens: Tensor, side: int) -> Tensor:
    """Averages tokens over cells, from B x H x W x K x c to B x h x w x K x c. Edge cells may have fewer tokens."""
    if side == 1:
        return tokens
    height, width = tokens.shape[1:3]
    h, w = (height + side - 1) // side, (width + side - 1) // side
    padded = F.pad(tokens, (0, 0, 0, 0, 0, w * side - width, 0, h * side - height))
    sums = padded.reshape(-1, h, side, w, side, *tokens.shape[3:]).sum((2, 4))
    rows, columns = (
        (size - side * torch.arange(n, device=tokens.device)).clamp(max=side) for size, n in ((height, h), (width, w))
    )
    return sums / (rows[:, None] * columns)[:, :, None, None]


def on_tokens(cells: Tensor, tokens: Tensor, side: int) -> Tensor:
    """Copies the values of cells, B x h x w x K x c, to their tokens, B x H x W x K x c."""
    if side == 1:
        return cells
    rows, columns = (torch.arange(size, device=cells.device) // side for size in tokens.shape[1:3])
    return cells.index_select(1, rows).index_select(2, columns)


def axis_kernel(position: Tensor, size: int, axis: int, identity: bool = False) -> Tensor:
    """Returns K x n x n, P along one axis of the grid: softmax_j(a_1 d^2 + a d) with d = j - i.

    Axis 1 is vertical, and axis 2 is horizontal.
    """
    index = torch.arange(size, device=position.device)
    shift = index[None] - index[:, None]
    if identity:
        return (shift == 0).to(position.dtype).expand(len(position), size, size)
    linear = position[:, 3 - axis, None, None]
    return (position[:, :1, None] * shift.square() + linear * shift).softmax(-1)
