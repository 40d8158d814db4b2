"""Finds thresholds for a budget, and computes the accuracy and the cost of thresholds.

The functions share the following tensors, for K exits and N images:

- ``conf``, ``K x N``: the largest probability of exit k for image n
- ``hit``, ``K x N``: whether exit k predicts the class of image n correctly
- ``gflops``, ``K``: the cost of an image that leaves at exit k, including all earlier exits

A row of thresholds has one value per exit. An image leaves at the first exit with ``conf >= threshold``.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

NOBODY, EVERYBODY = 1e8, -1e8  # thresholds above and below all probabilities


def shares(exits: int, points: int = 59) -> Tensor:
    """Returns a ``points x exits`` tensor with the share of the images that should leave at each exit.

    In row i - 1, the share of exit k is proportional to p^k with p = i / 20.
    """
    p = torch.arange(1, points + 1) / 20
    powers = (p.log()[:, None] * torch.arange(1, exits + 1)).exp()  # bitwise equal to the published code
    return powers / powers.sum(1, keepdim=True)


def find_thresholds(conf: Tensor, shares: Tensor) -> Tensor:
    """Finds the ``P x K`` thresholds for which given shares of the images leave at each exit.

    The images with the highest confidence leave first. Images with equal confidence leave together. If fewer images
    remain than an exit's share, the exit takes none.

    Args:
        conf: The largest probabilities, ``K x N``.
        shares: P rows with the share of the images for each exit, ``P x K``.
    """
    exits, images = conf.shape
    wanted = (images * shares.float()).floor().long()  # in float32, like the published thresholds
    left = torch.ones(len(shares), images, dtype=torch.bool)
    thresholds = torch.full((len(shares), exits), EVERYBODY, dtype=conf.dtype)
    for k in range(exits - 1):
        surest, order = conf[k].sort(descending=True)
        so_far = left[:, order].cumsum(1)
        enough = (so_far >= wanted[:, k, None]) & (wanted[:, k, None] > 0)
        found = surest[enough.int().argmax(1)]
        thresholds[:, k] = torch.where(enough.any(1), found, NOBODY)
        left &= conf[k] < thresholds[:, k, None]
    return thresholds


def exits_taken(conf: Tensor, thresholds: Tensor) -> Tensor:
    """Returns a ``P x N`` tensor with the index of the exit at which each image leaves.

    The last exit takes all remaining images.
    """
    leaves = conf >= thresholds[:, :, None]
    leaves[:, -1] = True
    return leaves.int().argmax(1)


class Outcome(NamedTuple):
    """Accuracy in percent, mean GFLOPs, and images that leave at each exit, for each row of thresholds."""

    accuracy: Tensor
    gflops: Tensor
    left: Tensor


def outcome(conf: Tensor, hit: Tensor, thresholds: Tensor, gflops: Tensor) -> Outcome:
    taken = exits_taken(conf, thresholds)
    right = hit.bool().gather(0, taken)
    left = torch.stack([(taken == k).sum(1) for k in range(len(conf))], 1)
    cost = left.double() @ gflops.double() / conf.shape[1]
    return Outcome(100 * right.double().mean(1), cost, left)


def search(
    conf: Tensor, hit: Tensor, gflops: Tensor, budgets: Tensor, also: Tensor | None = None, candidates: int = 1000
) -> Tensor:
    """Returns the most accurate thresholds for each of P budgets, ``P x K``.

    The search compares all combinations of candidates. Candidates are quantiles of an exit's confidences and the
    thresholds in ``also``. On the given images, the result is thus at least as accurate as ``also``. The search suits
    two or three exits, because each further exit multiplies the memory by ``candidates``.

    Args:
        conf: The largest probabilities, ``K x N``.
        hit: Whether predictions are correct, ``K x N``.
        gflops: The cost of each exit.
        budgets: P budgets of mean GFLOPs.
        also: Further thresholds to compare, ``Q x K``.
        candidates: Number of quantiles for each exit.
    """
    exits, images = conf.shape
    free = exits - 1
    values = [_candidates(conf[k], candidates, None if also is None else also[:, k]) for k in range(free)]
    sizes = [len(v) for v in values]
    # For candidate j, image n leaves at exit k if j < reached[k][n].
    reached = [torch.searchsorted(v, conf[k], right=True) for k, v in enumerate(values)]
    right = torch.zeros(sizes, dtype=torch.double)
    cost = torch.zeros(sizes, dtype=torch.double)
    for k in range(exits):
        leaving = [*reached[: k + 1]] if k < free else reached
        right += _by_candidates(leaving, sizes, k, hit[k].double())
        cost += _by_candidates(leaving, sizes, k, gflops[k].double().expand(images))
    by_cost, order = cost.flatten().sort(stable=True)
    best = right.flatten()[order].cummax(0).indices
    affordable = torch.searchsorted(by_cost, budgets.double() * images * (1 + 1e-6), right=True) - 1
    if (affordable < 0).any():
        raise ValueError(
            f'The budget of {budgets.min():.4g} GFLOPs is below the {gflops[0]:.4g} GFLOPs of the first exit.'
        )
    places = torch.unravel_index(order[best[affordable]], sizes)
    found = [v[i] for v, i in zip(values, places, strict=True)]
    return torch.stack([*found, torch.full_like(budgets, EVERYBODY, dtype=conf.dtype)], 1)


def _candidates(conf: Tensor, number: int, also: Tensor | None) -> Tensor:
    """Returns thresholds in ascending order. All images reach the first threshold, and no image reaches the last."""
    distinct = conf.unique()
    if len(distinct) > number:
        distinct = distinct[torch.linspace(0, len(distinct) - 1, number).long()]
    parts = [distinct, distinct.new_tensor([EVERYBODY, NOBODY]), *([] if also is None else [also.to(conf)])]
    return torch.cat(parts).unique()


def _by_candidates(reached: Sequence[Tensor], sizes: Sequence[int], leaves: int, weight: Tensor) -> Tensor:
    """For each combination of candidates, sums ``weight`` over the images that leave at exit ``leaves``.

    A histogram counts how many candidates each image reaches at each exit. Cumulative sums along the axes then select
    the images that reach the candidate of exit ``leaves`` but no earlier one.
    """
    shape = [size + 1 for size in sizes[: len(reached)]]
    cell = torch.zeros_like(reached[0])
    for size, r in zip(shape, reached, strict=True):
        cell = cell * size + r
    table = torch.bincount(cell, weight, minlength=torch.Size(shape).numel()).view(shape)
    for k, size in enumerate(sizes[: len(reached)]):
        below = table.cumsum(k)
        if k == leaves:
            below = below.narrow(k, size, 1) - below
        table = below.narrow(k, 0, size)
    return table.view(*table.shape, *[1] * (len(sizes) - len(reached)))


def read_thresholds(file: str | Path, gflops: float, search: str = 'sweep') -> list[float]:
    """Reads thresholds from a file that ``tools/dvt_budget.py`` wrote.

    Returns the most expensive thresholds whose mean cost is at most ``gflops``.

    Args:
        file: The JSON file.
        gflops: Budget of mean GFLOPs.
        search: Name of the curve: ``'sweep'`` or ``'exact'``.
    """
    points = json.loads(Path(file).read_text()).get(search)
    if not points:
        raise ValueError(f'{file} has no curve {search!r}. Files with curves are written by tools/dvt_budget.py --out.')
    affordable = [point for point in points if point['gflops'] <= gflops]
    if not affordable:
        least = min(point['gflops'] for point in points)
        raise ValueError(f'gflops={gflops}: the cheapest thresholds in {file} need {least:.4g} on average.')
    return max(affordable, key=lambda point: point['gflops'])['thresholds']
