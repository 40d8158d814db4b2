"""How far the heads of a DTN layer look, and how much they take from there."""

import copy
from typing import Any

import torch
from torch import Tensor

from mmdtn.norms import DTN
from mmdtn.ops.reference import axis_kernel


@torch.no_grad()
def lambdas(layer: DTN) -> tuple[Tensor, Tensor]:
    """Lambda of mean and variance, ``K`` each: 1 is LayerNorm, 0 the neighbourhood alone."""
    given: Any = ((layer.mean_mix, layer.mean_lambda), (layer.var_mix, layer.var_lambda))
    mean, var = (torch.full((layer.num_heads,), fixed) if mix is None else mix.sigmoid() for mix, fixed in given)
    return mean, var


@torch.no_grad()
def mean_distance(layer: DTN, height: int, width: int) -> Tensor:
    """Mean attention distance of P on a grid of ``height x width`` tokens, in tokens, by head: ``K``.

    The mean over all tokens i of the sum over j of P[i, j] times the distance from i to j. Exact without a tensor of
    all pairs: horizontal and vertical shift are independent under P, so their distributions are all it takes.
    """
    rows, columns = (_by_distance(kernel) for kernel in kernels(layer, height, width))
    h, w = columns.shape[1], rows.shape[1]
    distance = torch.hypot(*torch.meshgrid(torch.arange(float(h)), torch.arange(float(w)), indexing='ij'))
    return layer.pool_size * torch.einsum('kh,kw,hw->k', columns, rows, distance.to(rows))


@torch.no_grad()
def kernels(layer: DTN, height: int, width: int) -> tuple[Tensor, Tensor]:
    """P on a grid of ``height x width`` tokens, along its rows, ``K x w x w``, and along its columns, ``K x h x h``.

    For a layer that pools, ``h x w`` are cells.
    """
    h, w = -(-height // layer.pool_size), -(-width // layer.pool_size)
    rows, columns = (axis_kernel(position(layer), n, axis, layer.settings.identity) for n, axis in ((w, 2), (h, 1)))
    return rows, columns


def position(layer: DTN) -> Tensor:
    """Coefficients of P, ``K x 3``: zeros where P is the same for all."""
    return torch.zeros(layer.num_heads, 3) if layer.position is None else layer.position.detach().float()


def attended(layer: DTN, height: int, width: int, query: tuple[int, int]) -> Tensor:
    """What P gives one query, ``(y, x)`` in cells, from every cell: ``K x h x w``; each head sums to 1."""
    rows, columns = kernels(layer, height, width)
    y, x = query
    return columns[:, y, :, None] * rows[:, x, None, :]


def at_start(layer: DTN) -> DTN:
    """The layer before any training. Heads that start at random start at other numbers than the layer's did."""
    start = copy.deepcopy(layer)
    start.reset_parameters()
    return start


def _by_distance(kernel: Tensor) -> Tensor:
    """How likely each distance along an axis is for a token picked at random: ``K x n x n`` to ``K x n``."""
    size = kernel.shape[-1]
    index = torch.arange(size, device=kernel.device)
    distance = (index[None] - index[:, None]).abs()
    likely = kernel.new_zeros(len(kernel), size)
    return likely.index_add_(1, distance.flatten(), kernel.flatten(1)) / size
