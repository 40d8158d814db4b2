"""Batch sampler that makes augmentation independent of the data workers."""

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
    """Batch sampler that numbers the samples of another batch sampler and seeds the augmentation of each sample.

    The number of a sample is its position in the whole run, counted over all processes. The augmentation depends on
    this number, but not on data workers or previously drawn random numbers.

    The dataset needs no changes. As documented, torch's loader fetches a batch as ``[dataset[i] for i in batch]``. When
    a process loads a batch of this sampler, it seeds the random generators before each index. In contrast, torchdata's
    ``StatefulDataLoader`` saves the random states of the workers, so a run must resume with the same number of workers.

    Args:
        sampler: Sampler of the indices, which mmengine passes.
        batch_size: Number of samples in a batch, which mmengine passes.
        batch_sampler: Config of the batch sampler that forms the batches.
        seed: Seed of the augmentation.
        endless: Whether the next epoch follows the last batch.
    """

    def __init__(
        self, sampler: Any, batch_size: int, batch_sampler: dict, seed: int = 0, endless: bool = False
    ) -> None:
        self.sampler, self.batch_size = sampler, batch_size  # mmengine reads both
        self.seed, self.endless = seed, endless
        inner = dict(sampler=sampler, batch_size=batch_size)
        self.batch_sampler: Any = DATA_SAMPLERS.build(batch_sampler, default_args=inner)
        self._skipped = 0

    def skip(self, batches: int) -> None:
        """Skips the given number of batches at the start of the next iteration without loading their images."""
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
    """Indices of the samples in a batch. Iterating over the batch seeds all random generators before each index."""

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
    """Seeds Python, NumPy and torch with a number that is derived from the arguments."""
    value = int(np.random.SeedSequence((seed, stream, number)).generate_state(1)[0])
    random.seed(value)
    np.random.seed(value)
    torch.manual_seed(value)
