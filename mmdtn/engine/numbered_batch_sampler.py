"""Batches whose samples are augmented alike, whoever loads them and whenever."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
import torch
from mmengine.dist import get_dist_info
from mmengine.registry import DATA_SAMPLERS
from torch.utils.data import Sampler


@DATA_SAMPLERS.register_module()
class NumberedBatchSampler(Sampler):
    """The batches of another batch sampler, each sample numbered by its place in the whole run over all processes.

    A sample's augmentation is seeded with its number, so it depends neither on the data workers nor on what else drew
    random numbers before. The data set stays as it is: torch's loader, says its documentation, fetches a batch as
    ``[dataset[i] for i in batch]``, and to go through a batch made here seeds the generators before each index, in the
    process that loads. (torchdata's ``StatefulDataLoader`` saves the workers' states: it ties a run to their number.)

    Args:
        sampler, batch_size: As for any batch sampler; mmengine gives both.
        batch_sampler: Settings of the one whose batches to take.
        seed: Of the augmentation.
        endless: Start over, with the sampler's next epoch, where the batches end.
    """

    def __init__(
        self, sampler: Any, batch_size: int, batch_sampler: dict, seed: int = 0, endless: bool = False
    ) -> None:
        self.sampler, self.batch_size = sampler, batch_size  # which mmengine reads
        self.seed, self.endless = seed, endless
        inner = dict(sampler=sampler, batch_size=batch_size)
        self.batch_sampler: Any = DATA_SAMPLERS.build(batch_sampler, default_args=inner)
        self._skipped = 0

    def skip(self, batches: int) -> None:
        """Leaves out this many batches the next time, as they were seen before; none of their images is loaded."""
        self._skipped = batches

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def __iter__(self) -> Iterator['NumberedBatch']:
        skipped, self._skipped = self._skipped, 0
        for number, batch in enumerate(self._batches()):
            if number >= skipped:
                yield batch

    def _batches(self) -> Iterator['NumberedBatch']:
        rank, world_size = get_dist_info()
        first_epoch = getattr(self.sampler, 'epoch', 0)
        for epoch in count(first_epoch):
            if epoch > first_epoch:
                if not self.endless or not len(self):
                    return
                if hasattr(self.sampler, 'set_epoch'):
                    self.sampler.set_epoch(epoch)
            place = epoch * len(self.sampler)
            for indices in self.batch_sampler:
                numbers = [(place + i) * world_size + rank for i in range(len(indices))]
                yield NumberedBatch(indices, numbers, self.seed)
                place += len(indices)


@dataclass
class NumberedBatch:
    """Indices of a data set; to go through them seeds all generators for each."""

    indices: Sequence[int]
    numbers: Sequence[int]
    seed: int

    def __len__(self) -> int:
        return len(self.indices)

    def __iter__(self) -> Iterator[int]:
        for index, number in zip(self.indices, self.numbers, strict=True):
            seed_everything(self.seed, 1, number)
            yield index


def seed_everything(seed: int, stream: int, number: int) -> None:
    """Seeds Python, NumPy and torch with one number made of three."""
    value = int(np.random.SeedSequence((seed, stream, number)).generate_state(1)[0])
    random.seed(value)
    np.random.seed(value)
    torch.manual_seed(value)
