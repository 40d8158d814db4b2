"""DTN as a function of tensors, with a backward pass of its own, for eager code: ``graph`` is the same for graphs.

Plain autograd would keep about ten tensors of the input's size. This keeps the input, a few numbers per token and what
was pooled, and computes the rest again; checkpointing keeps as little, but its backward runs autograd's many passes.
Each direction goes through the tokens twice (``tokens``), in parts of them and in place, as the time goes into touching
memory; in between, P mixes what was found of cells. For the same reason the constant factors of a channel, ``weight``
among them, wait until a pass over the tokens needs them.

Letters as in the paper: ``z`` the (pre-normalised) token, ``M`` and ``V`` mean and variance of its neighbourhood, ``l``
and ``k`` the lambdas of mean and variance. Tokens are ``B x h x s x w x s x K x c``, cells ``B x h x w x K x c``.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from . import tokens
from .cells import memory_of_cells, on_tokens, over_size
from .kernels import both_kernels
from .parts import in_parts, spare_memory
from .separable import make_pair, mix, mix_backward


class Settings(NamedTuple):
    """What a layer computes, in plain values: the constants of a compiled region."""

    num_heads: int
    pool_size: int
    eps: float
    prenorm: bool
    unbiased: bool
    pool_second_moment: bool
    identity: bool
    by_operators: bool = False  # in compiled code: P by ``operators``, not by ``blocks``


class Saved(NamedTuple):
    """What the backward pass does not compute again."""

    scale: Tensor | None  # with prenorm: 1 / RMS of each head's slice of a token
    mean: Tensor  # of a token, over all channels
    var: Tensor
    shift: Tensor  # mean of all cells of an image
    cell_mean: Tensor | None  # with cells larger than a token
    cell_var: Tensor | None
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
    x = by_head(x, s)
    K, c = x.shape[-2:]
    C, pooling = K * c, s.pool_size > 1
    spare = spare_memory(x, 2)
    mean, var = (spare[0].new_empty(*x.shape[:-2], 1, 1) for _ in range(2))
    scale = spare[0].new_empty(*x.shape[:-1], 1) if s.prenorm else None
    cell_mean = memory_of_cells(x, spare[0])
    cell_var = torch.empty_like(cell_mean) if pooling and s.pool_second_moment else None
    constants = dict(
        eps=mean.new_full((1,), s.eps),
        average=mean.new_full((C,), 1 / C),
        average_of_squares=mean.new_full((C,), 1 / (C - int(s.unbiased))),
    )
    for part in in_parts(spare, x, present, scale, mean, var, cell_mean, cell_var):
        tokens.find_statistics(*part, **constants)
    shift = cell_mean.mean((1, 2), keepdim=True)
    kernels = both_kernels(position, cell_mean.shape[1], cell_mean.shape[2], s.identity)
    saved = Saved(scale, mean, var, shift, cell_mean if pooling else None, cell_var, *kernels)
    _, mixed, _ = _neighbourhood(cell_mean, saved)

    l, k = _of_channels(mean_lambda, c), _of_channels(var_lambda, c)
    mu, variance = _share(x, mixed, shift, l, k, s, *spare)
    y = spare[0] if spare[0].shape == x.shape and spare[0].dtype == dtype else torch.empty_like(x, dtype=dtype)
    for part in in_parts(spare, x, scale, mean, var, mu, variance, y):
        tokens.normalise(*part, l=l, k=k, weight=weight.view(K, c), bias=bias.view(K, c))
    return y.flatten(-2), saved


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
    scale, mean, var, shift, cell_mean, cell_var, rows, columns = saved
    grad, x = by_head(grad, s), by_head(x, s)
    K, c = x.shape[-2:]
    C = K * c
    l, k, w = _of_channels(mean_lambda, c), _of_channels(var_lambda, c), weight.view(K, c)
    (spare,), d = spare_memory(x, 1), torch.empty_like(x, dtype=mean.dtype)
    if cell_mean is None:
        cell_mean = memory_of_cells(x, tokens.prenormalise(x, scale, spare))
    pair, mixed, mixed_rows = _neighbourhood(cell_mean, saved)

    mu, variance = _share(x, mixed, shift, l, k, s, spare, d)
    d_cells, e_cells = memory_of_cells(x, d), memory_of_cells(x, spare)
    of_mean, of_var = torch.empty_like(mean), torch.empty_like(var)
    ones = torch.ones_like(mean)
    wl, wk, sums = (w * l).flatten(), (w * k).flatten(), mean.new_zeros(3, C).unbind()
    for part in in_parts([spare], x, grad, scale, mean, var, mu, variance, d, d_cells, e_cells, of_mean, of_var, ones):
        tokens.to_statistics(*part, l=l, k=k, wl=wl, wk=wk, sums=sums)

    grad_bias, d_mean, e_var = (t.view(K, c) for t in sums)
    M, V = mixed
    d_shift = (d_cells.sum(2).sum(1) * shift.view(-1, K, c)).sum(0)
    grad_mean_lambda = w * ((M * d_cells).sum(2).sum((0, 1)) + d_shift - d_mean)
    e_V = (V * e_cells).sum(2).sum((0, 1))
    grad_var_lambda = w / 2 * (e_V - e_var)
    grad_weight = (1 - k) * e_V + k * e_var + s.eps * e_cells.sum(2).sum((0, 1))  # e times the variance, by its parts

    # Through M = P p and V = relu(P q - M^2) to the pair (p, q): the relu passes where V is positive.
    grad_M, grad_V = mixed
    grad_V.gt_(0).mul_(e_cells).mul_((k - 1) * w / 2)
    grad_M.mul_(grad_V).mul_(-2).addcmul_(d_cells, (l - 1) * w)
    grad_position, (grad_first, grad_second) = mix_backward(rows, columns, pair, mixed_rows, mixed)

    # From all statistics to the tokens. With the variance of cells in it, q is their mean of (z - shift)^2.
    of_second = None
    if cell_var is None:
        grad_first.addcmul_(pair[0], grad_second, value=2)
    else:
        grad_first.addcmul_(shift, grad_second, value=-2)
        of_second = on_tokens(over_size(grad_second, present, s.pool_size, e_cells))
    if s.pool_size > 1:
        grad_first = over_size(grad_first, present, s.pool_size, d_cells)
    of_first = on_tokens(grad_first)

    average_of_head = mean.new_full((c,), 1 / c)
    of_var /= int(s.unbiased) - C
    of_token = (of_mean / -C).addcmul_(of_var, mean, value=-1)
    for part in in_parts([spare], x, d, scale, of_first, of_second, of_token, of_var):
        tokens.to_tokens(*part, weight=w, average_of_head=average_of_head, eps=s.eps)
    grads = grad_weight.flatten(), grad_bias.flatten(), grad_mean_lambda.sum(-1), grad_var_lambda.sum(-1), grad_position
    return d.flatten(-2).to(x.dtype), *grads


def by_head(x: Tensor, s: Settings) -> Tensor:
    return x.unflatten(-1, (s.num_heads, x.shape[-1] // s.num_heads))


def _neighbourhood(values: Tensor, saved: Saved) -> tuple[Tensor, Tensor, Tensor]:
    """The pair that P mixes, the mixed pair ``(M - shift, V)``, and it mixed along rows only.

    A variance does not change when all tokens shift by one value, here their mean over the image: E[x^2] - E[x]^2 then
    cancels only as far as a neighbourhood differs from the image, not as far as the image differs from zero.
    """
    pair = make_pair(values, saved.shift, saved.cell_var)
    mixed, mixed_rows = mix(saved.rows, saved.columns, pair)
    mixed[1].addcmul_(mixed[0], mixed[0], value=-1).clamp_(min=0)
    return pair, mixed, mixed_rows


def _of_channels(heads: Tensor, c: int) -> Tensor:
    """``K`` to ``K x c`` in memory: eager loops run over all channels then, not over the few of a head."""
    return heads[:, None].expand(-1, c).contiguous()


def _share(
    x: Tensor, mixed: Tensor, shift: Tensor, l: Tensor, k: Tensor, s: Settings, *memory: Tensor
) -> tuple[Tensor, Tensor]:
    """What the neighbourhood contributes to ``-mu`` and to ``var + eps``."""
    (M, V), (m, v) = mixed, (1 - l, 1 - k)
    mu, variance = (memory_of_cells(x, t) for t in memory)
    torch.addcmul(-m * shift, M, m, value=-1, out=mu)
    torch.addcmul(v.new_full((1,), s.eps), V, v, out=variance)
    return on_tokens(mu), on_tokens(variance)
