"""Computes lambda and P of DTN layers, which tell how local the statistics of each head are."""

import copy
from typing import Any

import torch
from torch import Tensor

from mmdtn.norms import DTN
from mmdtn.ops.reference import axis_kernel


@torch.no_grad()
def lambdas(layer: DTN) -> tuple[Tensor, Tensor]:
    """Returns the lambdas of mean and variance of the ``K`` heads.

    A head with lambda 1 uses the statistics of LayerNorm. A head with lambda 0 uses only the statistics
    of the neighbourhood.
    """
    given: Any = ((layer.mean_mix, layer.mean_lambda), (layer.var_mix, layer.var_lambda))
    mean, var = (torch.full((layer.num_heads,), fixed) if mix is None else mix.sigmoid() for mix, fixed in given)
    return mean, var


@torch.no_grad()
def mean_distance(layer: DTN, height: int, width: int) -> Tensor:
    """Computes the mean attention distance of P for each of the ``K`` heads on a grid of ``height x width`` tokens.

    The distance is the mean over all tokens i of the sum over j of ``P[i, j]`` times the distance from i to j, in
    tokens. Horizontal and vertical offsets are independent under P. The result is therefore exact, although only the
    two distributions of offsets are computed instead of all pairs of tokens.
    """
    rows, columns = (_by_distance(kernel) for kernel in kernels(layer, height, width))
    h, w = columns.shape[1], rows.shape[1]
    distance = torch.hypot(*torch.meshgrid(torch.arange(float(h)), torch.arange(float(w)), indexing='ij'))
    return layer.pool_size * torch.einsum('kh,kw,hw->k', columns, rows, distance.to(rows))


@torch.no_grad()
def kernels(layer: DTN, height: int, width: int) -> tuple[Tensor, Tensor]:
    """Computes P of a grid of ``height x width`` tokens along rows, ``K x w x w``, and along columns, ``K x h x h``.

    ``h`` and ``w`` count tokens, or cells if the layer pools.
    """
    h, w = -(-height // layer.pool_size), -(-width // layer.pool_size)
    rows, columns = (axis_kernel(position(layer), n, axis, layer.settings.identity) for n, axis in ((w, 2), (h, 1)))
    return rows, columns


def position(layer: DTN) -> Tensor:
    """Returns the ``K x 3`` coefficients of P. The coefficients are zero in a layer whose P is uniform."""
    return torch.zeros(layer.num_heads, 3) if layer.position is None else layer.position.detach().float()


def attended(layer: DTN, height: int, width: int, query: tuple[int, int]) -> Tensor:
    """Returns the row of P of one query at ``(y, x)``, in cells, as ``K x h x w``. The weights of a head sum to 1."""
    rows, columns = kernels(layer, height, width)
    y, x = query
    return columns[:, y, :, None] * rows[:, x, None, :]


def at_start(layer: DTN) -> DTN:
    """Returns a copy of the layer with initial parameters.

    Parameters with random initial values are drawn again, so they differ from those that the layer started from.
    """
    start = copy.deepcopy(layer)
    start.reset_parameters()
    return start


def _by_distance(kernel: Tensor) -> Tensor:
    """Computes the distribution of distances along an axis over all tokens, from ``K x n x n`` to ``K x n``."""
    size = kernel.shape[-1]
    index = torch.arange(size, device=kernel.device)
    distance = (index[None] - index[:, None]).abs()
    likely = kernel.new_zeros(len(kernel), size)
    return likely.index_add_(1, distance.flatten(), kernel.flatten(1)) / size
