"""Which thresholds spend how much, and what they earn: functions of tensors.

``conf``, ``K x N``, is the largest probability of exit k for image n; ``hit``, ``K x N``, whether its answer is right;
``gflops``, ``K``, the cost of an image that leaves at exit k, all exits before included. A row of thresholds has one
for each exit: an image leaves at the first exit with ``conf >= threshold``.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

NOBODY, EVERYBODY = 1e8, -1e8  # thresholds that no probability reaches, or every one


def shares(exits: int, points: int = 59) -> Tensor:
    """``points x exits``: what part of the images should leave where. In row i - 1 p = i / 20: p^k over their sum."""
    p = torch.arange(1, points + 1) / 20
    powers = (p.log()[:, None] * torch.arange(1, exits + 1)).exp()  # to the bit as published: images are counted by it
    return powers / powers.sum(1, keepdim=True)


def find_thresholds(conf: Tensor, shares: Tensor) -> Tensor:
    """``P x K`` thresholds with which ``shares``, ``P x K``, of the images leave at each exit.

    The surest leave first; equal probabilities leave together. Where too few are left, nobody leaves.
    """
    exits, images = conf.shape
    wanted = (images * shares.float()).floor().long()  # in float32, as the published thresholds
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
    """``P x N``: the exit, from 0, at which each image leaves; the last one takes what is left."""
    leaves = conf >= thresholds[:, :, None]
    leaves[:, -1] = True
    return leaves.int().argmax(1)


class Outcome(NamedTuple):
    """Of each of P rows of thresholds: accuracy in percent, mean GFLOPs, and how many of the images leave where."""

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
    """``P x K``: for each of P budgets of mean GFLOPs, the thresholds that get most images right.

    Of all combinations of ``candidates`` quantiles of each exit's probabilities, and of the thresholds ``also``,
    ``Q x K``: what it finds is no worse than these on the same images. Two exits or three; each more would take
    ``candidates`` times the memory.
    """
    exits, images = conf.shape
    free = exits - 1
    values = [_candidates(conf[k], candidates, None if also is None else also[:, k]) for k in range(free)]
    sizes = [len(v) for v in values]
    # Image n leaves at exit k by candidate j if j < reached[k][n].
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
        raise ValueError(f'No image costs less than {gflops[0]:.4g} GFLOPs, but {budgets.min():.4g} are to be enough.')
    places = torch.unravel_index(order[best[affordable]], sizes)
    found = [v[i] for v, i in zip(values, places, strict=True)]
    return torch.stack([*found, torch.full_like(budgets, EVERYBODY, dtype=conf.dtype)], 1)


def _candidates(conf: Tensor, number: int, also: Tensor | None) -> Tensor:
    """Thresholds in rising order, from one that everybody reaches to one that nobody does."""
    distinct = conf.unique()
    if len(distinct) > number:
        distinct = distinct[torch.linspace(0, len(distinct) - 1, number).long()]
    parts = [distinct, distinct.new_tensor([EVERYBODY, NOBODY]), *([] if also is None else [also.to(conf)])]
    return torch.cat(parts).unique()


def _by_candidates(reached: Sequence[Tensor], sizes: Sequence[int], leaves: int, weight: Tensor) -> Tensor:
    """For each combination of candidates the sum of ``weight`` over images that leave at exit ``leaves``.

    A histogram of how many candidates an image reaches at each exit, and sums along its axes: of those who reach a
    candidate where they leave, of those who do not before.
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
    """Those of a curve that ``tools/dvt_budget.py`` wrote whose mean GFLOPs are nearest below ``gflops``."""
    points = json.loads(Path(file).read_text()).get(search)
    if not points:
        raise ValueError(f'{file} has no curve {search!r}: tools/dvt_budget.py --out writes such files.')
    affordable = [point for point in points if point['gflops'] <= gflops]
    if not affordable:
        least = min(point['gflops'] for point in points)
        raise ValueError(f'gflops={gflops}: the cheapest thresholds in {file} take {least:.4g} in the mean.')
    return max(affordable, key=lambda point: point['gflops'])['thresholds']
