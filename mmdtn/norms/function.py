"""DTN as a function of tensors, with a backward pass of its own.

Plain autograd would keep about ten tensors of the input's size. This keeps the input, a few numbers per token and what
was pooled, and computes the rest again; checkpointing keeps as little, but its backward runs autograd's many passes.
Both directions work in place where they can: the time goes into touching memory, most of all fresh memory. For the
same reason the constant factors of a channel, ``weight`` among them, wait until a pass over the tokens needs them.

Letters as in the paper: ``z`` the (pre-normalised) token, ``M`` and ``V`` mean and variance of its neighbourhood, ``l``
and ``k`` the lambdas of mean and variance. Tokens are ``B x h x s x w x s x K x c``, cells of tokens
``B x h x 1 x w x 1 x K x c``, so that cells broadcast to their tokens; what P mixes is ``B x h x w x K x c``.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .cells import cell_sum
from .kernels import axis_kernel
from .memory import into
from .separable import Pair, make_pair, mix, mix_backward


class Settings(NamedTuple):
    """What a layer computes, in plain values: the constants of a compiled region."""

    num_heads: int
    pool_size: int
    eps: float
    prenorm: bool
    unbiased: bool
    pool_second_moment: bool
    identity: bool
    by_products: bool = True  # P as matrix products, or else as sums, for compiled code on small grids


class Saved(NamedTuple):
    """What the backward pass does not compute again."""

    scale: Tensor | None  # with prenorm: 1 / RMS of each head's slice of a token
    mean: Tensor  # of a token, over all channels
    var: Tensor
    shift: Tensor  # mean of all cells of an image
    cell_mean: Tensor | None  # with cells larger than a token
    cell_second: Tensor | None  # mean of (z - shift)^2 over a cell
    rows: Tensor  # P along the rows of the grid, and along its columns
    columns: Tensor


def forward(
    x: Tensor,
    present: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    mean_lambda: Tensor,
    var_lambda: Tensor,
    position: Tensor,
    dtype: torch.dtype,
    s: Settings,
) -> tuple[Tensor, Saved]:
    """Normalises ``x``, ``B x h x s x w x s x C``, with its mask of ``present`` tokens; gives the result in ``dtype``.

    ``weight``, ``bias``: ``C``; lambdas: ``K``; ``position``: ``K x 3``.
    """
    z = _by_head(x, s)
    scale = None
    if s.prenorm:
        scale = torch.linalg.vector_norm(z, dim=-1, keepdim=True).square_().div_(z.shape[-1]).add_(s.eps).rsqrt_()
    z = _prenormalise(z, scale, torch.empty_like(z))
    mean = z.flatten(-2).mean(-1)[..., None, None]
    spare = z - mean
    var = torch.linalg.vector_norm(spare, dim=(-2, -1), keepdim=True).square_().div_(x.shape[-1] - int(s.unbiased))
    cell_mean = None if s.pool_size == 1 else _mean_of_cells(z, present, s)
    shift = (z if cell_mean is None else cell_mean).mean((1, 3), keepdim=True)
    cell_second = None
    if s.pool_size > 1 and s.pool_second_moment:
        squares = into(spare, torch.sub, z, shift).square_()
        cell_second = _mean_of_cells(squares if present is None else squares.mul_(present[..., None]), present, s)
    saved = Saved(scale, mean, var, shift, cell_mean, cell_second, *_kernels(position, z, s))
    _, mixed, _ = _neighbourhood(z, saved, s)
    z, variance = _centre(z, saved, mixed, mean_lambda[:, None], var_lambda[:, None], s, spare)
    z.mul_(variance.rsqrt_())
    y = into(z, torch.addcmul, bias.view(z.shape[-2:]), z, weight.view(z.shape[-2:]))
    return y.view(x.shape).to(dtype), saved


def backward(
    grad: Tensor,
    x: Tensor,
    present: Tensor | None,
    weight: Tensor,
    mean_lambda: Tensor,
    var_lambda: Tensor,
    saved: Saved,
    s: Settings,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """From the gradient of the output those of x, weight, bias, the two lambdas and the position."""
    scale, mean, var, shift, _, cell_second, rows, columns = saved
    g = _by_head(grad, s)
    z = _prenormalise(_by_head(x, s), scale, torch.empty_like(g))
    K, c = z.shape[-2:]
    C = K * c
    l, k, w = mean_lambda[:, None], var_lambda[:, None], weight.view(K, c)
    pair, mixed, mixed_rows = _neighbourhood(z, saved, s)
    z, variance = _centre(z, saved, mixed, l, k, s, torch.empty_like(z))

    # y = weight * z / sqrt(variance) + bias: weight * d is the gradient of z, -weight / 2 * e that of the variance.
    e = z.div_(variance)
    d = variance.rsqrt_().mul_(g)
    e.mul_(d)
    grad_bias = _sum_tokens(g)
    d_cells, e_cells = (cell_sum(t.flatten(-2)).squeeze(4).squeeze(2).unflatten(-1, (K, c)) for t in (d, e))
    flat_d, flat_e = d.view(-1, C), e.view(-1, C)
    M, V = mixed
    of_shift = (d_cells.sum(2).sum(1) * shift.view(-1, K, c)).sum(0).view(C)
    grad_mean_lambda = w * ((d_cells * M).sum(2).sum((0, 1)).flatten() + of_shift - _sum_tokens(d, mean)).view(K, c)
    of_V, of_var, of_eps = (e_cells * V).sum(2).sum((0, 1)), _sum_tokens(e, var).view(K, c), e_cells.sum(2).sum((0, 1))
    grad_var_lambda = w / 2 * (of_V - of_var)
    grad_weight = ((1 - k) * of_V + k * of_var + s.eps * of_eps).view(C)  # sum of e times the variance, by its parts

    # Through M = P p and V = relu(P q - M^2) to the pair (p, q): the relu passes where V is positive.
    grad_M, grad_V = mixed
    grad_V.gt_(0).mul_(e_cells).mul_((k - 1) * w / 2)
    grad_M.mul_(grad_V).mul_(-2).addcmul_(d_cells, (l - 1) * w)
    grad_position, (grad_first, grad_second) = mix_backward(rows, columns, pair, mixed_rows, mixed)
    if cell_second is None:
        grad_first.addcmul_(pair[0], grad_second, value=2)
    else:
        grad_first.addcmul_(shift.squeeze(4).squeeze(2), grad_second, value=-2)

    # From all statistics to the tokens. What changes z along itself, prenorm undoes but for the share of eps.
    grad_mean = -(flat_d @ (l * w).view(C)).view(mean.shape)
    grad_var = -(flat_e @ (k * w).view(C)).view(mean.shape) / (C - int(s.unbiased))
    size = _cell_size(present, s)
    gz = into(d, torch.addcmul, _on_tokens(grad_first, s, size), d, w)
    tokens = _by_head(x, s)
    if cell_second is not None:
        gz.addcmul_(_prenormalise(tokens, scale, e), _on_tokens(grad_second, s, size), value=2)
    gz.add_(grad_mean / C - grad_var * mean)
    if scale is None:
        gz.addcmul_(tokens, grad_var)
    else:
        along = into(e, torch.mul, gz, tokens).sum(-1, keepdim=True) / c
        gz.mul_(scale).addcmul_(tokens, (grad_var * s.eps * scale - along) * scale * scale * scale)

    grads = grad_weight, grad_bias, grad_mean_lambda.sum(-1), grad_var_lambda.sum(-1), grad_position
    return gz.view(x.shape).to(x.dtype), *grads


def statistics_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _by_head(x: Tensor, s: Settings) -> Tensor:
    return x.to(statistics_dtype(x)).unflatten(-1, (s.num_heads, x.shape[-1] // s.num_heads))


def _prenormalise(z: Tensor, scale: Tensor | None, memory: Tensor) -> Tensor:
    """A copy of ``z``, divided by the RMS of each slice where ``scale`` is given."""
    return memory.copy_(z) if scale is None else into(memory, torch.mul, z, scale)


def _cell_size(present: Tensor | None, s: Settings) -> Tensor | float:
    """How many tokens there are in each cell."""
    return float(s.pool_size**2) if present is None else cell_sum(present)[..., None]


def _mean_of_cells(z: Tensor, present: Tensor | None, s: Settings) -> Tensor:
    return cell_sum(z.flatten(-2)).unflatten(-1, z.shape[-2:]) / _cell_size(present, s)


def _kernels(position: Tensor, z: Tensor, s: Settings) -> tuple[Tensor, Tensor]:
    h, w = z.shape[1], z.shape[3]
    if s.identity:
        rows, columns = (torch.eye(n, dtype=position.dtype, device=position.device) for n in (w, h))
        return rows.expand(s.num_heads, w, w), columns.expand(s.num_heads, h, h)
    return axis_kernel(position, w, axis=1), axis_kernel(position, h, axis=2)


def _neighbourhood(z: Tensor, saved: Saved, s: Settings) -> tuple[Pair, Pair, Pair]:
    """The pair that P mixes, the mixed pair ``(M - shift, V)``, and it mixed along rows only.

    A variance does not change when all tokens shift by one value, here their mean over the image: E[x^2] - E[x]^2 then
    cancels only as far as a neighbourhood differs from the image, not as far as the image differs from zero.
    """
    values = z if saved.cell_mean is None else saved.cell_mean
    second = None if saved.cell_second is None else saved.cell_second.squeeze(4).squeeze(2)
    pair = make_pair(values.squeeze(4).squeeze(2), saved.shift.squeeze(4).squeeze(2), second, s.by_products)
    mixed, mixed_rows = mix(saved.rows, saved.columns, pair)
    mixed[1].addcmul_(mixed[0], mixed[0], value=-1).clamp_(min=0)
    return pair, mixed, mixed_rows


def _centre(
    z: Tensor, saved: Saved, mixed: Pair, l: Tensor, k: Tensor, s: Settings, spare: Tensor
) -> tuple[Tensor, Tensor]:
    """Mixes the statistics: ``z - mu`` in the memory of ``z``, and ``var + eps`` in the spare memory."""
    M, V = (_on_tokens(t, s) for t in mixed)
    # K x 1 to K x c in memory: eager loops run over all channels then, not over the few of a head.
    m, v = ((1 - t).expand(z.shape[-2:]).contiguous() for t in (l, k))
    variance = into(spare, torch.mul, V.expand_as(z), v).add_(k * saved.var + s.eps)
    return z.addcmul_(M, m, value=-1).sub_(m * saved.shift).sub_(l * saved.mean), variance


def _on_tokens(cells: Tensor, s: Settings, size: Tensor | float | None = None) -> Tensor:
    """Values of cells, ``B x h x w x K x c``, over the size of the cells, so that they broadcast to the tokens."""
    cells = cells[:, :, None, :, None]
    if s.pool_size == 1:
        return cells
    if size is not None:
        cells = cells / size
    # In memory along the rows of tokens: eager loops then run over whole rows, not over the channels of one token.
    return cells.expand(-1, -1, -1, -1, s.pool_size, -1, -1).contiguous()


def _sum_tokens(tokens: Tensor, factor: Tensor | None = None) -> Tensor:
    """To one value per channel, ``C``, with a factor for each token."""
    if torch.compiler.is_compiling():
        # Row by row: Inductor goes through all it sums once for each few channels, and a row stays in the cache.
        tokens = tokens if factor is None else tokens * factor
        return cell_sum(tokens.flatten(-2)).sum((2, 3, 4)).sum((0, 1))
    tokens = tokens.reshape(-1, tokens.shape[-2] * tokens.shape[-1])
    return tokens.sum(0) if factor is None else tokens.mT @ factor.view(-1)
