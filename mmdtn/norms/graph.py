"""DTN as plain expressions, for compilers and for exported programs; ``function`` is the same for eager code.

The letters, arguments and results are those of ``function``. Nothing is done in place: what ``computed_once`` marks
goes to memory, and Inductor fuses the rest with what reads it.
"""

import torch
from torch import Tensor

from . import blocks, operators
from .cells import mean_of_cells, on_tokens, over_size, sum_of_cells
from .function import Saved, Settings, by_head
from .inductor import computed_once
from .kernels import both_kernels
from .parts import statistics_dtype


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
    P = operators if s.by_operators else blocks
    x = by_head(x, s).to(statistics_dtype(x))
    K, c = x.shape[-2:]
    scale = computed_once((x.square().mean(-1, keepdim=True) + s.eps).rsqrt()) if s.prenorm else None
    z = _prenormalise(x, scale)
    mean = computed_once(z.mean((-2, -1), keepdim=True))
    var = computed_once((z - mean).square().sum((-2, -1), keepdim=True) / (K * c - int(s.unbiased)))
    cell_mean, cell_var = mean_of_cells(z, present), None
    if s.pool_size > 1:
        cell_mean = computed_once(cell_mean)
        if s.pool_second_moment:
            squares = (z - on_tokens(cell_mean)).square()
            cell_var = computed_once(mean_of_cells(squares if present is None else squares * present, present))
    shift = computed_once(cell_mean.mean((1, 2), keepdim=True))
    rows, columns = both_kernels(position, cell_mean.shape[1], cell_mean.shape[2], s.identity)
    saved = Saved(scale, mean, var, shift, cell_mean if s.pool_size > 1 else None, cell_var, rows, columns)

    mixed, _ = P.mix(rows, columns, P.make_pair(cell_mean, shift, cell_var))
    centred, variance = _centre(z, mixed, mean_lambda[:, None], var_lambda[:, None], saved, s)
    y = centred * variance.rsqrt() * weight.view(K, c) + bias.view(K, c)
    return y.to(dtype).flatten(-2), saved


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
    P = operators if s.by_operators else blocks
    scale, mean, var, shift, cell_mean, cell_var, rows, columns = saved
    dtype = x.dtype
    grad, x = by_head(grad, s).to(mean.dtype), by_head(x, s).to(mean.dtype)
    K, c = x.shape[-2:]
    C = K * c
    l, k, w = mean_lambda[:, None], var_lambda[:, None], weight.view(K, c)
    z = _prenormalise(x, scale)
    pair = P.make_pair(sum_of_cells(z) if cell_mean is None else cell_mean, shift, cell_var)
    mixed, mixed_rows = P.mix(rows, columns, pair)

    centred, variance = _centre(z, mixed, l, k, saved, s)
    r = variance.rsqrt()
    # With expressions of their own, the sums over channels are made in the loop that fills d and e.
    of_mean = computed_once((grad * r * (w * l)).sum((-2, -1), keepdim=True)) / -C
    of_var = computed_once((centred * r * r * r * grad * (w * k)).sum((-2, -1), keepdim=True)) / (int(s.unbiased) - C)
    d, e = computed_once(r * grad), computed_once(r * grad * (centred * r * r))
    d_cells, e_cells = sum_of_cells(d), sum_of_cells(e)
    if s.pool_size > 1:
        d_cells, e_cells = computed_once(d_cells), computed_once(e_cells)

    M, V = mixed[0], _variance(mixed)
    grad_bias, d_mean, e_var = (_total(sum_of_cells(t)) for t in (grad, d * mean, e * var))
    d_M, e_V = _total(d_cells * M), _total(e_cells * V)
    d_shift = computed_once((computed_once(d_cells.sum(2)).sum(1) * shift.view(-1, K, c)).sum(0))
    grad_mean_lambda = w * (d_M + d_shift - d_mean)
    grad_var_lambda = w / 2 * (e_V - e_var)
    grad_weight = (1 - k) * e_V + k * e_var + s.eps * _total(e_cells)

    grad_V = torch.where(V > 0, e_cells, 0) * ((k - 1) * w / 2)
    grad_M = d_cells * ((l - 1) * w) - 2 * M * grad_V
    grad_position, (grad_first, grad_second) = P.mix_backward(rows, columns, pair, mixed_rows, (grad_M, grad_V))

    if cell_var is None:
        gradient = on_tokens(over_size(grad_first + 2 * pair[0] * grad_second, present, s.pool_size))
    else:
        gradient = on_tokens(over_size(grad_first - 2 * shift * grad_second, present, s.pool_size))
        gradient = gradient + z * on_tokens(over_size(2 * grad_second, present, s.pool_size))
    gradient = gradient + d * w + (of_mean - of_var * mean)
    if scale is None:
        grad_x = gradient + x * of_var
    else:
        gradient = computed_once(gradient)
        along = (gradient * x).sum(-1, keepdim=True)
        grad_x = gradient * scale + x * ((of_var * s.eps * scale - along / c) * scale**3)
    grads = grad_weight.flatten(), grad_bias.flatten(), grad_mean_lambda.sum(-1), grad_var_lambda.sum(-1), grad_position
    return grad_x.flatten(-2).to(dtype), *grads


def _prenormalise(x: Tensor, scale: Tensor | None) -> Tensor:
    return x if scale is None else x * scale


def _variance(mixed: tuple[Tensor, Tensor]) -> Tensor:
    M, second = mixed
    return (second - M * M).clamp(min=0)


def _centre(
    z: Tensor, mixed: tuple[Tensor, Tensor], l: Tensor, k: Tensor, saved: Saved, s: Settings
) -> tuple[Tensor, Tensor]:
    """``z - mu``, and the variance plus eps."""
    mu = on_tokens((1 - l) * (mixed[0] + saved.shift)) + l * saved.mean
    return z - mu, on_tokens((1 - k) * _variance(mixed)) + (k * saved.var + s.eps)


def _total(cells: Tensor) -> Tensor:
    """Row by row: Inductor goes through all it sums once for each few channels, and a row stays in the cache."""
    return computed_once(computed_once(cells.sum(2)).sum((0, 1)))  # or else sums over few cells are written out in full
