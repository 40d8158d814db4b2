"""Hook that shows progress bars in a terminal."""

import sys
from typing import Any

from mmengine.dist import is_main_process
from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from mmengine.runner import Runner
from tqdm import tqdm


@HOOKS.register_module()
class ProgressHook(Hook):
    """Hook that shows progress, remaining time, loss and learning rate in tqdm bars at the bottom of a terminal.

    Files and pipes receive only mmengine's log lines. MMEngine's ``LoggerHook`` writes lines only at intervals, and its
    ``ProgressBar`` shows no loss.
    """

    priority = 'LOWEST'  # runs after other hooks have set the values to show

    def before_run(self, runner: Runner) -> None:
        self.bars: list[tqdm] = []  # all open bars, of which only the last is on the screen
        for handler in runner.logger.handlers:
            if getattr(handler, 'stream', None) is sys.stdout:
                handler.addFilter(self._make_room)

    def _make_room(self, record: Any) -> bool:
        """Clears the bars, so that tqdm draws them again below the log line."""
        for bar in self.bars:
            bar.clear()
        return True

    def _open(self, name: str, total: int, done: int = 0) -> None:
        options = dict(leave=name == 'train', disable=not (is_main_process() and sys.stdout.isatty()))
        self.bars.append(tqdm(desc=name, total=total, initial=done, position=0, file=sys.stdout, **options))

    def before_train(self, runner: Runner) -> None:
        self._open('train', runner.max_iters, runner.iter)

    def before_val_epoch(self, runner: Runner) -> None:
        self._open('val', len(runner.val_dataloader))

    def before_test_epoch(self, runner: Runner) -> None:
        self._open('test', len(runner.test_dataloader))

    def after_train_iter(self, runner: Runner, *args: Any, **kwargs: Any) -> None:
        said = dict(epoch=f'{runner.epoch + 1}/{runner.max_epochs}')
        for name in ('loss', 'lr'):
            if f'train/{name}' in runner.message_hub.log_scalars:
                said[name] = f'{runner.message_hub.get_scalar(f"train/{name}").current():.3g}'
        self.bars[-1].set_postfix(said, refresh=False)
        self.bars[-1].update()

    def after_val_iter(self, *args: Any, **kwargs: Any) -> None:
        self.bars[-1].update()

    def after_test_iter(self, *args: Any, **kwargs: Any) -> None:
        self.bars[-1].update()

    def after_val_epoch(self, *args: Any, **kwargs: Any) -> None:
        self.bars.pop().close()

    def after_run(self, runner: Runner) -> None:
        for bar in reversed(self.bars):
            bar.close()
