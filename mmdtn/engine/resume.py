"""A run that was stopped and resumed does what an uninterrupted one does.

mmengine restores weights, optimizer, schedules and counters. What it does not: the place within an epoch, the random
state of the process and of its data workers, the sampler's seed where the config says none, and gradients that
accumulate over iterations. Instead of saving
random states, everything random here follows from the seed and a number: that of the iteration for the model, that of
the drawn sample for its augmentation. So it does not matter what a validation in between has used up, or how many data
workers there are.
"""

import random
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import torch
from mmengine.dist import get_dist_info
from mmengine.hooks import Hook
from mmengine.logging import print_log
from mmengine.registry import HOOKS, LOOPS
from mmengine.runner import EpochBasedTrainLoop, IterBasedTrainLoop, Runner
from torch.utils.data import BatchSampler, DataLoader, Sampler


@LOOPS.register_module()
class ResumableEpochLoop(EpochBasedTrainLoop):
    """``EpochBasedTrainLoop`` that goes on in the middle of an epoch, with the batches that have not been seen."""

    _iter: int
    _done: int

    def run(self) -> torch.nn.Module:
        hub = self.runner.message_hub  # saved in checkpoints and restored from them
        length, saved_length = len(self.dataloader), hub.runtime_info.get('batches_in_epoch')
        self._done = self._iter - self._epoch * (saved_length or length)
        if self._done and saved_length != length:
            print_log(
                f'Epoch {self._epoch + 1} starts over: it had {saved_length} batches when it was saved, now {length}.',
                'current',
            )
            self._done = 0
        if saved_length != length:
            self._iter = self._epoch * length
        hub.update_info('batches_in_epoch', length)
        return super().run()

    def run_epoch(self) -> None:
        self.runner.call_hook('before_train_epoch')
        self.runner.model.train()
        batches = _without_first(self.dataloader, self._done) if self._done else self.dataloader
        for index, batch in enumerate(batches, self._done):
            self.run_iter(index, batch)
        self._done = 0
        self.runner.call_hook('after_train_epoch')
        self._epoch += 1


def _without_first(loader: DataLoader, done: int) -> DataLoader:
    """The rest of an epoch; images that were seen before are not loaded again."""
    return DataLoader(
        loader.dataset,
        batch_sampler=list(loader.batch_sampler or ())[done:],
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        prefetch_factor=loader.prefetch_factor,
    )


@HOOKS.register_module()
class SeedByNumberHook(Hook):
    """Seeds each iteration by its number, and the augmentation of each sample by its number in the run."""

    priority = 'VERY_HIGH'  # before other hooks use random numbers

    def before_train(self, runner: Runner) -> None:
        loader = runner.train_dataloader
        if loader.batch_sampler is None:  # without batches of its own, a data set deals with its samples itself
            return
        # The sampler was built before the checkpoint was read, with a new seed where the config has none.
        hub = runner.message_hub
        sampler: Any
        for sampler in (loader.sampler, getattr(loader.batch_sampler, 'sampler', None)):
            if hasattr(sampler, 'seed'):
                sampler.seed = hub.runtime_info.get('sampler_seed', sampler.seed)
                hub.update_info('sampler_seed', sampler.seed)
        if isinstance(getattr(loader.batch_sampler, 'sampler', None), Sampler):
            loader.batch_sampler.sampler = _Numbered(loader.batch_sampler.sampler, _samples_skipped(runner))
            # The fetcher of torch looks this up on the data set, which so remains the object that it is.
            loader.dataset.__getitems__ = partial(_fetch, loader.dataset, runner.seed)

    def before_train_iter(self, runner: Runner, *args: Any, **kwargs: Any) -> None:
        _seed(runner.seed, 0, runner.iter)


@HOOKS.register_module()
class PendingGradientsHook(Hook):
    """Saves the gradients that accumulate towards the next step of the optimizer, and goes on from them."""

    def before_save_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        # Between steps mmengine leaves no gradient. Those of other processes are out of reach here.
        if get_dist_info()[1] == 1:
            gradients = {name: p.grad.cpu() for name, p in runner.model.named_parameters() if p.grad is not None}
            if gradients:
                checkpoint['pending_gradients'] = gradients

    def after_load_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        self.loaded = checkpoint.get('pending_gradients', {})

    def before_train(self, runner: Runner) -> None:
        for name, parameter in runner.model.named_parameters():
            if runner.iter and name in getattr(self, 'loaded', {}):
                parameter.grad = self.loaded[name].to(parameter)


def _samples_skipped(runner: Runner) -> int:
    """How far mmengine will move the sampler without asking it for indices."""
    batches = runner.train_dataloader.batch_sampler
    skips = isinstance(runner.train_loop, IterBasedTrainLoop) and not getattr(
        runner.train_loop, 'fast_forward_on_resume', False
    )
    if skips and type(batches) is BatchSampler and hasattr(batches.sampler, 'skip'):
        return runner.iter * batches.batch_size
    return 0


class _Draw(int):
    """An index that knows which drawn sample of the run it is."""

    number: int


class _Numbered(Sampler):
    """The indices of ``sampler`` as draws, numbered over all processes, so that their number does not matter."""

    def __init__(self, sampler: Any, first: int) -> None:  # torch's Sampler promises no length, those of MM have one
        self.sampler, self.first = sampler, first

    def __getattr__(self, name: str) -> Any:
        return getattr(self.sampler, name)

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[_Draw]:
        rank, world_size = get_dist_info()
        first = self.first + getattr(self.sampler, 'epoch', 0) * len(self)
        for position, index in zip(count(first), self.sampler, strict=False):
            draw = _Draw(index)
            draw.number = position * world_size + rank
            yield draw


def _fetch(dataset: Any, seed: int, draws: Sequence[_Draw]) -> list[Any]:
    samples = []
    for draw in draws:
        _seed(seed, 1, draw.number)
        samples.append(dataset[int(draw)])
    return samples


def _seed(seed: int, stream: int, number: int) -> None:
    value = int(np.random.SeedSequence((seed, stream, number)).generate_state(1)[0])
    random.seed(value)
    np.random.seed(value)
    torch.manual_seed(value)
