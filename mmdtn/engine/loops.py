"""Training loops that give a resumed run the same results as an uninterrupted run.

MMEngine restores weights, optimizer, schedules and counters. MMEngine does not restore the position within an epoch,
the random states of the process and its data workers, or a sampler seed that is not set in the config.

These loops save no random states. Instead, the iteration number seeds the model, and the sample number seeds the
augmentation of a sample. Random numbers drawn during validation therefore do not affect training.
"""

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from mmengine.logging import print_log
from mmengine.registry import LOOPS
from mmengine.runner import BaseLoop, EpochBasedTrainLoop, IterBasedTrainLoop, Runner
from torch.utils.data import BatchSampler, DataLoader

from .numbered_batch_sampler import NumberedBatchSampler, seed_everything


@LOOPS.register_module()
class ResumableEpochLoop(EpochBasedTrainLoop):
    """``EpochBasedTrainLoop`` that can resume in the middle of an epoch with the remaining batches."""

    _iter: int
    _done: int

    def __init__(self, runner: Runner, dataloader: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(runner, _with_numbers(dataloader), *args, **kwargs)
        _show_batch_size(self.dataloader)

    def run(self) -> torch.nn.Module:
        _restore_seeds(self.runner, self.dataloader)
        hub = self.runner.message_hub  # checkpoints save and restore its content
        length, saved_length = len(self.dataloader), hub.runtime_info.get('batches_in_epoch')
        self._done = self._iter - self._epoch * (saved_length or length)
        if self._done and saved_length != length:
            print_log(
                f'Epoch {self._epoch + 1} starts over, because it now has {length} batches instead of {saved_length}.',
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
        batches: Any = self.dataloader
        if isinstance(batches.batch_sampler, NumberedBatchSampler):
            batches.batch_sampler.skip(self._done)
        else:
            batches = islice(batches, self._done, None)
        for index, batch in enumerate(batches, self._done):
            self.run_iter(index, batch)
        self._done = 0
        self.runner.call_hook('after_train_epoch')
        self._epoch += 1

    def run_iter(self, idx: int, data_batch: Any) -> None:
        seed_everything(self.runner.seed, 0, self._iter)
        super().run_iter(idx, data_batch)


@LOOPS.register_module()
class ResumableIterLoop(IterBasedTrainLoop):
    """``IterBasedTrainLoop`` that resumes without loading the images of earlier iterations."""

    _iter: int

    def __init__(self, runner: Runner, dataloader: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(runner, _with_numbers(dataloader, endless=True), *args, **kwargs)
        _show_batch_size(self.dataloader)
        if isinstance(self.dataloader.batch_sampler, NumberedBatchSampler):
            self.dataloader_iterator = _Batches(self.dataloader)

    def run(self) -> torch.nn.Module:
        _restore_seeds(self.runner, self.dataloader)
        return super().run()

    def run_iter(self, data_batch: Any) -> None:
        seed_everything(self.runner.seed, 0, self._iter)
        super().run_iter(data_batch)


@LOOPS.register_module(name='ResumableLoop')
def resumable_loop(runner: Runner, dataloader: Any, **settings: Any) -> BaseLoop:
    """Builds an epoch-based loop for settings with ``max_epochs``, and an iteration-based loop otherwise.

    Example:
        train_cfg = dict(type='ResumableLoop', max_epochs=12, val_interval=1)
    """
    loop = ResumableEpochLoop if 'max_epochs' in settings else ResumableIterLoop
    return loop(runner, dataloader, **settings)


class _Batches:
    """Endless source of batches for ``IterBasedTrainLoop``."""

    def __init__(self, loader: DataLoader) -> None:
        self.loader = loader
        self.iterator: Iterator[Any] | None = None

    def skip_iter(self, batches: int) -> None:
        self.loader.batch_sampler.skip(batches)  # type: ignore[union-attr]

    def __next__(self) -> Any:
        if self.iterator is None:
            self.iterator = iter(self.loader)
        return next(self.iterator)


def _with_numbers(loader: Any, endless: bool = False) -> Any:
    """Returns the settings of a loader that numbers its samples.

    Loaders that are already built or load no batches are returned unchanged.
    """
    if not isinstance(loader, dict) or loader.get('batch_size') is None:
        return loader
    loader = dict(loader)
    plain = dict(type=BatchSampler, drop_last=loader.pop('drop_last', False))
    batches = loader.get('batch_sampler') or plain
    return dict(loader, batch_sampler=dict(type=NumberedBatchSampler, batch_sampler=batches, endless=endless))


def _show_batch_size(loader: DataLoader) -> None:
    """Sets the loader's batch size for MMPretrain's PreciseBNHook.

    With a batch sampler, torch sets the batch size to None and offers no public way to change it.
    """
    if isinstance(loader.batch_sampler, NumberedBatchSampler):
        vars(loader)['batch_size'] = loader.batch_sampler.batch_size


def _restore_seeds(runner: Runner, loader: DataLoader) -> None:
    """Restores the sampler's seed from the checkpoint.

    The sampler is built before the checkpoint is loaded, and gets a new seed if the config sets none.
    """
    if isinstance(loader.batch_sampler, NumberedBatchSampler):
        sampler, hub = loader.batch_sampler.sampler, runner.message_hub
        loader.batch_sampler.seed = runner.seed
        if hasattr(sampler, 'seed'):
            sampler.seed = hub.runtime_info.get('sampler_seed', sampler.seed)
            hub.update_info('sampler_seed', sampler.seed)
