"""What DTN does to tokens, ``... x s x w x s x K x c``: passes over all of them or over a part, into given memory.

Letters as in ``function``. Values of tokens are ``... x s x w x s x 1 x 1``, those of cells ``... x w x K x c``, and
``... x 1 x w x 1 x K x c`` where tokens read them; where each cell is one token, values of cells lie in the memory that
is given for tokens. Factors of channels are ``K x c``.
"""

import torch
from torch import Tensor

from .cells import mean_of_cells, on_tokens, sum_of_cells


def find_statistics(
    x: Tensor,
    present: Tensor | None,
    scale: Tensor | None,
    mean: Tensor,
    var: Tensor,
    cell_mean: Tensor,
    cell_var: Tensor | None,
    z: Tensor,
    squares: Tensor,
    *,
    eps: Tensor,
    average: Tensor,
    average_of_squares: Tensor,
) -> None:
    """Fills in what follows ``present``."""
    x = x.to(z.dtype)
    if scale is not None:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        torch.addcmul(eps, norm, norm, value=1 / x.shape[-1], out=scale).rsqrt_()
    prenormalise(x, scale, z)
    _over_channels(z, average, mean)
    _over_channels(_squared_difference(z, mean, squares), average_of_squares, var)
    if x.shape[-3] > 1:
        mean_of_cells(z, present, cell_mean)
    if cell_var is not None:
        _squared_difference(z, on_tokens(cell_mean), squares)
        mean_of_cells(squares if present is None else squares.mul_(present), present, cell_var)


def normalise(
    x: Tensor,
    scale: Tensor | None,
    mean: Tensor,
    var: Tensor,
    mu: Tensor,
    variance: Tensor,
    y: Tensor,
    spare: Tensor,
    spare_too: Tensor,
    *,
    l: Tensor,
    k: Tensor,
    weight: Tensor,
    bias: Tensor,
) -> None:
    """Fills in ``y``."""
    spare = y if y.dtype == spare.dtype else spare
    z, variance = _centre(x, scale, mean, var, mu, variance, spare, spare_too, l, k)
    torch.addcmul(bias, z.mul_(variance.rsqrt_()), weight, out=y)


def to_statistics(
    x: Tensor,
    grad: Tensor,
    scale: Tensor | None,
    mean: Tensor,
    var: Tensor,
    mu: Tensor,
    variance: Tensor,
    d: Tensor,
    d_cells: Tensor,
    e_cells: Tensor,
    of_mean: Tensor,
    of_var: Tensor,
    ones: Tensor,
    spare: Tensor,
    *,
    l: Tensor,
    k: Tensor,
    wl: Tensor,
    wk: Tensor,
    sums: tuple[Tensor, ...],
) -> None:
    """From the gradient of the output to what follows ``variance``; ``wl`` and ``wk`` are flat.

    y = weight * z / sqrt(variance) + bias: weight * d is the gradient of z, -weight / 2 * e that of the variance.
    Adds to ``sums``, of ``C``, those over tokens of the gradient, of ``d`` times ``mean`` and of ``e`` times ``var``.
    """
    grad = grad.to(mean.dtype)
    z, variance = _centre(x, scale, mean, var, mu, variance, spare, d, l, k)
    e = z.div_(variance)
    d = variance.rsqrt_().mul_(grad)
    of_grad, of_d_mean, of_e_var = sums
    _add_tokens(of_grad, grad, ones)  # as a product: a sum reads memory half as fast
    e.mul_(d)
    if x.shape[-3] > 1:
        sum_of_cells(d, out=d_cells)
        sum_of_cells(e, out=e_cells)
    _over_channels(d, wl, of_mean)
    _over_channels(e, wk, of_var)
    _add_tokens(of_d_mean, d, mean)
    _add_tokens(of_e_var, e, var)


def to_tokens(
    x: Tensor,
    d: Tensor,
    scale: Tensor | None,
    of_first: Tensor,
    of_second: Tensor | None,
    of_token: Tensor,
    of_var: Tensor,
    spare: Tensor,
    *,
    weight: Tensor,
    average_of_head: Tensor,
    eps: float,
) -> None:
    """Turns ``d`` into the gradient of ``x``."""
    x = x.to(d.dtype)
    gradient = torch.addcmul(of_first, d, weight, out=d)
    if of_second is not None:
        z = prenormalise(x, scale, spare)
        gradient.addcmul_(z, of_second, value=2)
    gradient.add_(of_token)
    if scale is None:
        gradient.addcmul_(x, of_var)
    else:
        # What changes z along itself, prenorm undoes but for the share of eps.
        along, square = torch.empty_like(scale), scale * scale
        if of_second is None:
            _over_channels(torch.mul(gradient, x, out=spare), average_of_head, along)
            along.mul_(scale)
        else:  # in place, as z is there: a third less memory to touch
            _over_channels(z.mul_(gradient), average_of_head, along)
        of_x = (of_var * eps * square).sub_(along).mul_(square)
        gradient.mul_(scale).addcmul_(x, of_x)


def prenormalise(x: Tensor, scale: Tensor | None, memory: Tensor) -> Tensor:
    """A copy of ``x``, divided by the RMS of each slice where ``scale`` is given."""
    return memory.copy_(x) if scale is None else torch.mul(x, scale, out=memory)


def _centre(
    x: Tensor,
    scale: Tensor | None,
    mean: Tensor,
    var: Tensor,
    mu: Tensor,
    variance: Tensor,
    spare: Tensor,
    spare_too: Tensor,
    l: Tensor,
    k: Tensor,
) -> tuple[Tensor, Tensor]:
    """``z - mu`` and the variance, in spare memory, from the neighbourhood's shares in ``-mu`` and in the variance."""
    mu = torch.addcmul(mu, mean, l, value=-1, out=spare)
    z = mu.add_(x) if scale is None else torch.addcmul(mu, x, scale, out=spare)
    return z, torch.addcmul(variance, var, k, out=spare_too)


def _over_channels(tokens: Tensor, weights: Tensor, result: Tensor) -> None:
    """Fills in the sum of the channels of each token with these weights, ``C``, or of each head with ``c``."""
    torch.mv(tokens.view(-1, weights.shape[0]), weights, out=result.view(-1))


def _squared_difference(tokens: Tensor, other: Tensor, memory: Tensor) -> Tensor:
    return torch.ops.aten.mse_loss.out(tokens, other, 0, out=memory)  # in one pass


def _add_tokens(total: Tensor, tokens: Tensor, factors: Tensor) -> None:
    """Adds to each channel's total, ``C``, the sum of all tokens with these factors."""
    total.addmv_(tokens.view(-1, total.shape[0]).mT, factors.view(-1))
