"""A line with progress, remaining time, loss and learning rate at the foot of a terminal."""

import shutil
import sys
import time
from datetime import timedelta
from logging import LogRecord
from typing import Any

from mmengine.dist import is_main_process
from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from mmengine.runner import Runner

SECONDS = 0.2  # between two drawings
CLEAR = '\r\x1b[K'


@HOOKS.register_module()
class ProgressHook(Hook):
    """Draws the line where a person looks at it; in files and pipes, only mmengine's plain log lines remain.

    (mmengine's ``LoggerHook`` writes its lines at intervals, and its ``ProgressBar`` knows no loss.)
    """

    priority = 'LOWEST'  # when the others have said what is to be shown

    def before_run(self, runner: Runner) -> None:
        self.shown = is_main_process() and sys.stdout.isatty()
        self.drawn = 0.0
        if self.shown:
            for handler in runner.logger.handlers:
                if getattr(handler, 'stream', None) is sys.stdout:
                    handler.addFilter(_clear_line)

    def after_train_iter(self, runner: Runner, *args: Any, **kwargs: Any) -> None:
        hub = runner.message_hub
        parts = [f'epoch {runner.epoch + 1}/{runner.max_epochs}'] if runner.max_epochs > 1 else []
        parts.append(_bar(runner.iter + 1, runner.max_iters))
        if 'eta' in hub.runtime_info:
            parts.append(f'eta {timedelta(seconds=int(hub.get_info("eta")))}')
        for name, form in (('loss', '.4f'), ('lr', '.2e')):
            if f'train/{name}' in hub.log_scalars:
                parts.append(f'{name} {hub.get_scalar(f"train/{name}").current():{form}}')
        self._draw(parts, last=runner.iter + 1 == runner.max_iters)

    def after_val_iter(self, runner: Runner, batch_idx: int, *args: Any, **kwargs: Any) -> None:
        self._draw_evaluation('validation', batch_idx + 1, len(runner.val_dataloader))

    def after_test_iter(self, runner: Runner, batch_idx: int, *args: Any, **kwargs: Any) -> None:
        self._draw_evaluation('test', batch_idx + 1, len(runner.test_dataloader))

    def after_run(self, runner: Runner) -> None:
        if self.shown:
            sys.stdout.write(CLEAR)

    def _draw_evaluation(self, name: str, done: int, total: int) -> None:
        self._draw([name, _bar(done, total)], last=done == total)

    def _draw(self, parts: list[str], last: bool) -> None:
        if not self.shown or (time.monotonic() - self.drawn < SECONDS and not last):
            return
        self.drawn = time.monotonic()
        sys.stdout.write(CLEAR + '  '.join(parts)[: shutil.get_terminal_size().columns - 1])
        sys.stdout.flush()


def _clear_line(record: LogRecord) -> bool:
    """A log line takes the place of the progress line, which is drawn again below it."""
    sys.stdout.write(CLEAR)
    return True


def _bar(done: int, total: int, width: int = 20) -> str:
    full = width * done // total
    return f'[{"#" * full}{"." * (width - full)}] {done}/{total}'
