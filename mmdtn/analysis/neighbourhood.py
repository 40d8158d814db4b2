"""Computes lambda and P of DTN layers, to show how local the statistics of each head are."""

import copy
from typing import Any

import torch
from torch import Tensor

from mmdtn.norms import DTN
from mmdtn.ops.reference import axis_kernel


@torch.no_grad()
def lambdas(layer: DTN) -> tuple[Tensor, Tensor]:
    """Returns the lambdas of the ``K`` heads for the mean and for the variance.

    A head with lambda 1 uses the statistics of LayerNorm. A head with lambda 0 uses only the statistics
    of the neighbourhood.
    """
    given: Any = ((layer.mean_mix, layer.mean_lambda), (layer.var_mix, layer.var_lambda))
    mean, var = (torch.full((layer.num_heads,), fixed) if mix is None else mix.sigmoid() for mix, fixed in given)
    return mean, var


@torch.no_grad()
def mean_distance(layer: DTN, height: int, width: int) -> Tensor:
    """Computes the mean attention distance of P for each head on a grid of ``height x width`` tokens.

    The distance of a head, in tokens, is the mean of ``sum_j P[i, j] * dist(i, j)`` over all tokens ``i``. Horizontal
    and vertical offsets are independent under P, so their two distributions give the exact result. The function
    therefore need not visit all pairs of tokens.
    """
    rows, columns = (_by_distance(kernel) for kernel in kernels(layer, height, width))
    h, w = columns.shape[1], rows.shape[1]
    distance = torch.hypot(*torch.meshgrid(torch.arange(float(h)), torch.arange(float(w)), indexing='ij'))
    return layer.pool_size * torch.einsum('kh,kw,hw->k', columns, rows, distance.to(rows))


@torch.no_grad()
def kernels(layer: DTN, height: int, width: int) -> tuple[Tensor, Tensor]:
    """Computes P along the rows and along the columns of a grid of ``height x width`` tokens.

    The results have the shapes ``K x w x w`` and ``K x h x h``. ``h`` and ``w`` count tokens, or cells if the layer
    pools.
    """
    h, w = -(-height // layer.pool_size), -(-width // layer.pool_size)
    rows, columns = (axis_kernel(position(layer), n, axis, layer.settings.identity) for n, axis in ((w, 2), (h, 1)))
    return rows, columns


def position(layer: DTN) -> Tensor:
    """Returns the ``K x 3`` coefficients of P, which are zero in a layer whose P is uniform."""
    return torch.zeros(layer.num_heads, 3) if layer.position is None else layer.position.detach().float()


def attended(layer: DTN, height: int, width: int, query: tuple[int, int]) -> Tensor:
    """Returns the ``K x h x w`` weights of P for a query at cell ``(y, x)``. The weights of each head sum to 1."""
    rows, columns = kernels(layer, height, width)
    y, x = query
    return columns[:, y, :, None] * rows[:, x, None, :]


def at_start(layer: DTN) -> DTN:
    """Returns a copy of the layer with newly initialised parameters.

    Random initial values are drawn again, so they differ from those with which the layer started.
    """
    start = copy.deepcopy(layer)
    start.reset_parameters()
    return start


def _by_distance(kernel: Tensor) -> Tensor:
    """Computes the ``K x n`` distribution of distances over all tokens from ``K x n x n`` weights along an axis."""
    size = kernel.shape[-1]
    index = torch.arange(size, device=kernel.device)
    distance = (index[None] - index[:, None]).abs()
    likely = kernel.new_zeros(len(kernel), size)
    return likely.index_add_(1, distance.flatten(), kernel.flatten(1)) / size
