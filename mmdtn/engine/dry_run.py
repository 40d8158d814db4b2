"""Estimates the time and memory of a training run from its first steps."""

import itertools
import statistics
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from mmengine.config import Config
from mmengine.dist import get_world_size, is_main_process
from mmengine.hooks import Hook
from mmengine.runner import EpochBasedTrainLoop, Runner

from .data_checks import check_data
from .launch import build_runner, checkpoint_settings

STEPS = 6  # number of training and validation steps; the first includes one-time costs and is not counted


def dry_run(cfg: Config, strict: bool = False) -> None:
    """Runs a few training and validation steps, and prints the time and memory that the whole run needs.

    The steps write their files to a temporary directory, which is then deleted.
    """
    with tempfile.TemporaryDirectory(prefix='dry-run-') as work_dir:
        cfg.work_dir = work_dir
        checkpoint_settings(cfg).pop('out_dir', None)
        # MMEngine shares a visualizer and its folder between all runs with the same name, so this name must be unique.
        cfg.visualizer = dict(cfg.get('visualizer') or dict(type='Visualizer'), name=Path(work_dir).name)
        runner = build_runner(cfg)
        runner.register_hook(_StopsAfterAFewSteps())
        check_data(runner, ('train', 'val'), strict)
        try:
            runner.train()
        except _Done as done:
            runner.call_hook('after_run')
            if is_main_process():
                print(done)
        finally:
            runner.visualizer.close()


class _Done(Exception):
    """Raised to leave the training loop. The message is the report."""


class _StopsAfterAFewSteps(Hook):
    """Hook that times the first steps and then ends the run."""

    priority = 'LOWEST'  # runs after all other hooks, so that their time counts

    def before_train(self, runner: Runner) -> None:
        self.last = runner.iter + min(STEPS, runner.max_iters - runner.iter)
        self.seconds: list[float] = []
        self.start = time.perf_counter()

    def after_val(self, runner: Runner) -> None:
        self.start = time.perf_counter()  # excludes the time of a validation between two short epochs

    def after_train_iter(self, runner: Runner, *args: Any, **kwargs: Any) -> None:
        _wait_for_gpu()
        now = time.perf_counter()
        self.seconds.append(now - self.start)
        self.start = now
        if runner.iter + 1 < self.last:
            return
        step = _typical(self.seconds)
        total = step * (runner.max_iters - runner.iter)
        lines = [f'training step: {step:.3f} s, {runner.max_iters} steps in {runner.max_epochs} epochs']
        if runner.val_loop is not None:
            batches, runs = len(runner.val_dataloader), _validations(runner)
            val_step = _time_validation_step(runner)
            total += val_step * batches * runs
            lines.append(f'validation step: {val_step:.3f} s, {batches} steps in each of {runs} validations')
        lines += [f'peak memory: {_peak_memory()}', f'time of the whole run: {timedelta(seconds=round(total))}']
        raise _Done('\n'.join(lines))


def _time_validation_step(runner: Runner) -> float:
    runner.model.eval()
    runner.call_hook('before_val')
    runner.call_hook('before_val_epoch')
    seconds = []
    start = time.perf_counter()
    for number, batch in enumerate(itertools.islice(runner.val_dataloader, STEPS)):
        runner.val_loop.run_iter(number, batch)
        _wait_for_gpu()
        now = time.perf_counter()
        seconds.append(now - start)
        start = now
    for metric in runner.val_loop.evaluator.metrics:  # a failing metric would end the run after its first epoch
        metric.evaluate(len(metric.results) * get_world_size())
    return _typical(seconds)


def _typical(seconds: list[float]) -> float:
    """Returns the median time of all steps after the first, or the time of a single step."""
    return statistics.median(seconds[1:] or seconds)


def _validations(runner: Runner) -> int:
    by_epoch = isinstance(runner.train_loop, EpochBasedTrainLoop)
    last = runner.max_epochs if by_epoch else runner.max_iters
    return sum(n % runner.val_interval == 0 or n == last for n in range(runner.val_begin, last + 1))


def _wait_for_gpu() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _peak_memory() -> str:
    if torch.cuda.is_available():
        return f'{torch.cuda.max_memory_allocated() / 2**30:.2f} GB on the GPU'
    try:
        import resource
    except ImportError:
        return 'unknown on this system'
    unit = 1 if sys.platform == 'darwin' else 1024  # number of bytes in one unit of ru_maxrss
    return f'{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30:.2f} GB of the process'
