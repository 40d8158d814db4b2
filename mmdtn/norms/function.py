"""DTN as a function of tensors, with a backward pass of its own.

Plain autograd would keep about ten tensors of the input's size. This keeps the input, a few numbers per token and what
was pooled, and computes the rest again; checkpointing keeps as little, but its backward runs autograd's many passes.
Both directions work in place where they can: the time goes into touching memory, most of all fresh memory.

Letters as in the paper: ``z`` the (pre-normalised) token, ``M`` and ``V`` mean and variance of its neighbourhood, ``l``
and ``k`` the lambdas of mean and variance. Tokens are ``B x h x s x w x s x K x c``, cells of tokens
``B x h x 1 x w x 1 x K x c``, so that cells broadcast to their tokens; what P mixes is ``B x h x w x K x c``.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .moments import Pair, axis_kernel, axis_kernel_backward, cell_sum, make_pair, mix, mix_backward


class Settings(NamedTuple):
    """What a layer computes, in plain values: the constants of a compiled region."""

    num_heads: int
    pool_size: int
    eps: float
    prenorm: bool
    unbiased: bool
    pool_second_moment: bool
    identity: bool


class Saved(NamedTuple):
    """What the backward pass does not compute again."""

    scale: Tensor | None  # with prenorm: 1 / RMS of each head's slice of a token
    mean: Tensor  # of a token, over all channels
    var: Tensor
    cell_mean: Tensor | None  # with cells larger than a token
    cell_var: Tensor | None


def forward(
    x: Tensor,
    present: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    mean_lambda: Tensor,
    var_lambda: Tensor,
    position: Tensor,
    s: Settings,
    dtype: torch.dtype,
) -> tuple[Tensor, Saved]:
    """Normalises ``x``, ``B x h x s x w x s x C``, with its mask of ``present`` tokens; gives the result in ``dtype``.

    ``weight``, ``bias``: ``C``; lambdas: ``K``; ``position``: ``K x 3``.
    """
    z = _by_head(x, s)
    scale = None
    if s.prenorm:
        scale = torch.linalg.vector_norm(z, dim=-1, keepdim=True).square_().div_(z.shape[-1]).add_(s.eps).rsqrt_()
    z = _prenormalise(z, scale)
    mean = z.flatten(-2).mean(-1)[..., None, None]
    spare = z - mean
    var = spare.square_().flatten(-2).sum(-1)[..., None, None].div_(x.shape[-1] - int(s.unbiased))
    cell_mean, cell_var = _pool(z, present, s, spare) if s.pool_size > 1 else (None, None)
    rows, columns = _kernels(position, z, s)
    shift, _, mixed, _ = _neighbourhood(z, cell_mean, cell_var, rows, columns)
    M, V = _as_cells(mixed)
    _normalise(z, mean, var, M.add_(shift), V, mean_lambda[:, None], var_lambda[:, None], s, inv_std=spare)
    y = z.mul_(weight.view(z.shape[-2:])).add_(bias.view(z.shape[-2:]))
    return y.view(x.shape).to(dtype), Saved(scale, mean, var, cell_mean, cell_var)


def backward(
    grad: Tensor,
    x: Tensor,
    present: Tensor | None,
    weight: Tensor,
    mean_lambda: Tensor,
    var_lambda: Tensor,
    position: Tensor,
    saved: Saved,
    s: Settings,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """From the gradient of the output those of x, weight, bias, the two lambdas and the position."""
    scale, mean, var, cell_mean, cell_var = saved
    g = _by_head(grad, s)
    n = _prenormalise(_by_head(x, s), scale)
    K, c = n.shape[-2:]
    C = K * c
    l, k = mean_lambda[:, None], var_lambda[:, None]
    rows, columns = _kernels(position, n, s)
    shift, pair, mixed, mixed_rows = _neighbourhood(n, cell_mean, cell_var, rows, columns)
    M, V = _as_cells(mixed)
    local = M + shift
    inv_std = torch.empty_like(n)
    _normalise(n, mean, var, local, V, l, k, s, inv_std)

    # y = weight * n + bias with n = (z - mu) * inv_std: d is the gradient of z - mu, e that of the mixed variance.
    d = g * n
    grad_weight = _sum_tokens(d)
    grad_bias = _sum_tokens(g)
    d.copy_(g).mul_(inv_std).mul_(weight.view(K, c))
    e = n.mul_(d).mul_(inv_std).mul_(-0.5)
    d_cells, e_cells = (cell_sum(t.flatten(-2)).unflatten(-1, (K, c)) for t in (d, e))
    flat_d, flat_e = d.view(-1, C), e.view(-1, C)
    grad_mean_lambda = (_sum_tokens(local.mul_(d_cells)) - flat_d.mT @ mean.view(-1)).view(K, c).sum(-1)
    grad_var_lambda = (flat_e.mT @ var.view(-1) - _sum_tokens(local.copy_(V).mul_(e_cells))).view(K, c).sum(-1)

    # Through M = P p and V = relu(P q - M^2) to the pair (p, q): the relu passes where V is positive.
    grad_M, grad_V = mixed
    grad_V.sign_().mul_(e_cells.squeeze(4).squeeze(2)).mul_(_per_channel(1 - k, n))
    grad_M.mul_(grad_V).mul_(-2).addcmul_(d_cells.squeeze(4).squeeze(2), _per_channel(1 - l, n), value=-1)
    grad_rows, grad_columns, grad_pair = mix_backward(rows, columns, pair, mixed_rows, mixed)
    grad_first, grad_second = _as_cells(grad_pair)
    grad_first = grad_first.addcmul_(_as_cells(pair)[0], grad_second, value=2)

    # From all statistics to the tokens.
    grad_mean = -(flat_d @ l.expand(K, c).reshape(-1)).view(mean.shape)
    grad_var = (flat_e @ k.expand(K, c).reshape(-1)).view(mean.shape).mul_(2 / (C - int(s.unbiased)))
    z = _prenormalise(_by_head(x, s), scale, into=e)
    gz = d.add_(grad_mean / C - grad_var * mean).addcmul_(z, grad_var)
    if cell_mean is None:
        gz.add_(grad_first)
    else:
        count = _cell_size(present, s)
        grad_first = grad_first / count
        if cell_var is not None:
            grad_second = grad_second * (2 / count)
            grad_first = grad_first.addcmul_(cell_mean, grad_second, value=-1)
            gz.addcmul_(z, grad_second)
        gz.add_(grad_first)
    if scale is not None:
        projection = inv_std.copy_(gz).mul_(z).sum(-1, keepdim=True).div_(c)
        gz.addcmul_(z, projection, value=-1).mul_(scale)

    square_x, shift_x = axis_kernel_backward(rows, grad_rows)
    square_y, shift_y = axis_kernel_backward(columns, grad_columns)
    grad_position = torch.stack((square_x + square_y, shift_x, shift_y), 1)
    return gz.view(x.shape).to(x.dtype), grad_weight, grad_bias, grad_mean_lambda, grad_var_lambda, grad_position


def statistics_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _by_head(x: Tensor, s: Settings) -> Tensor:
    return x.to(statistics_dtype(x)).unflatten(-1, (s.num_heads, x.shape[-1] // s.num_heads))


def _prenormalise(z: Tensor, scale: Tensor | None, into: Tensor | None = None) -> Tensor:
    """A copy of ``z``, divided by the RMS of each slice where ``scale`` is given."""
    if into is not None:
        z = into.copy_(z)
        return z if scale is None else z.mul_(scale)
    return z.clone() if scale is None else z * scale


def _cell_size(present: Tensor | None, s: Settings) -> Tensor | float:
    """How many tokens there are in each cell."""
    return float(s.pool_size**2) if present is None else cell_sum(present)[..., None]


def _pool(z: Tensor, present: Tensor | None, s: Settings, spare: Tensor) -> tuple[Tensor, Tensor | None]:
    """Mean of each cell and, where asked, the variance inside it: together its second moment, without cancellation."""
    size = _cell_size(present, s)
    cell_mean = cell_sum(z.flatten(-2)).view(*z.shape[:2], 1, z.shape[3], 1, *z.shape[5:]) / size
    if not s.pool_second_moment:
        return cell_mean, None
    squares = spare.copy_(z).sub_(cell_mean).square_()
    if present is not None:
        squares.mul_(present[..., None])
    return cell_mean, cell_sum(squares.flatten(-2)).view(cell_mean.shape) / size


def _kernels(position: Tensor, z: Tensor, s: Settings) -> tuple[Tensor, Tensor]:
    h, w = z.shape[1], z.shape[3]
    if s.identity:
        rows, columns = (torch.eye(n, dtype=position.dtype, device=position.device) for n in (w, h))
        return rows.expand(s.num_heads, w, w), columns.expand(s.num_heads, h, h)
    return axis_kernel(position, w, axis=1), axis_kernel(position, h, axis=2)


def _neighbourhood(
    z: Tensor, cell_mean: Tensor | None, cell_var: Tensor | None, rows: Tensor, columns: Tensor
) -> tuple[Tensor, Pair, Pair, Pair]:
    """``shift``, the pair that P mixes, the mixed pair ``(M - shift, V)``, and it mixed along rows only.

    A variance does not change when all tokens shift by one value, here their mean over the image: E[x^2] - E[x]^2 then
    cancels only as far as a neighbourhood differs from the image, not as far as the image differs from zero.
    """
    values = z if cell_mean is None else cell_mean
    shift = values.mean((1, 3), keepdim=True)
    variance = None if cell_var is None else cell_var.squeeze(4).squeeze(2)
    pair = make_pair(values.squeeze(4).squeeze(2), shift.squeeze(4).squeeze(2), variance)
    mixed, mixed_rows = mix(rows, columns, pair)
    mixed[1].addcmul_(mixed[0], mixed[0], value=-1).clamp_(min=0)
    return shift, pair, mixed, mixed_rows


def _normalise(
    z: Tensor, mean: Tensor, var: Tensor, M: Tensor, V: Tensor, l: Tensor, k: Tensor, s: Settings, inv_std: Tensor
) -> None:
    """Mixes the statistics and turns ``z`` into ``(z - mu) / std``; fills ``inv_std`` with ``1 / std``."""
    inv_std.copy_(V).mul_(_per_channel(1 - k, z)).add_(k * var + s.eps).rsqrt_()
    z.addcmul_(M, _per_channel(1 - l, z), value=-1).sub_(l * mean).mul_(inv_std)


def _per_channel(by_head: Tensor, z: Tensor) -> Tensor:
    """``K x 1`` to ``K x c`` in memory: eager loops run over all channels then, not over the few of a head."""
    return by_head.expand(z.shape[-2:]).contiguous()


def _as_cells(pair: Pair) -> tuple[Tensor, Tensor]:
    """The two maps ``B x h x w x K x c`` as cells, in the same memory."""
    return pair[0][:, :, None, :, None], pair[1][:, :, None, :, None]


def _sum_tokens(tokens: Tensor) -> Tensor:
    """To one value per channel, ``C``."""
    return tokens.reshape(-1, tokens.shape[-2] * tokens.shape[-1]).sum(0)
