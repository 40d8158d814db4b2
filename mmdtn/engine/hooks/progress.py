"""Progress, remaining time, loss and learning rate at the foot of a terminal."""

import sys
from typing import Any

from mmengine.dist import is_main_process
from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from mmengine.runner import Runner
from tqdm import tqdm


@HOOKS.register_module()
class ProgressHook(Hook):
    """tqdm's bars where a person looks at them; in files and pipes, only mmengine's plain log lines remain.

    (mmengine's ``LoggerHook`` writes its lines at intervals, and its ``ProgressBar`` knows no loss.)
    """

    priority = 'LOWEST'  # when the others have said what is to be shown

    def before_run(self, runner: Runner) -> None:
        self.bars: list[tqdm] = []  # that of a validation after, and on the screen in place of, that of the training
        for handler in runner.logger.handlers:
            if getattr(handler, 'stream', None) is sys.stdout:
                handler.addFilter(self._make_room)

    def _make_room(self, record: Any) -> bool:
        """A log line takes the place of the bars, which are drawn again below it."""
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
