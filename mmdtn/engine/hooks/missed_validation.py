"""Runs the validation that a killed run did not finish."""

from bisect import bisect
from pathlib import Path

from mmengine.dist import broadcast_object_list, master_only
from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from mmengine.runner import EpochBasedTrainLoop, Runner

NOTE = 'last_validation'  # in the work directory, the iterations before the last validation that finished


@HOOKS.register_module()
class MissedValidationHook(Hook):
    """Validates first where a run goes on from a checkpoint whose validation was not finished.

    A checkpoint is saved before its validation. mmengine goes on behind both, so that the log would lack a point of its
    curves, and ``save_best`` a candidate; after the last validation there would be no result at all.

    The validation runs in ``before_train``, because mmengine's loops go on from there to the next epoch, or to the end,
    without another call.
    """

    priority = 'LOWEST'  # when the other hooks are ready

    def before_train(self, runner: Runner) -> None:
        if not runner.iter or runner.val_loop is None or not _is_due(runner):
            return
        note = Path(runner.work_dir, NOTE)
        finished = [note.read_text() if note.exists() else '']
        broadcast_object_list(finished)  # other machines may not have the file
        if finished[0] != str(runner.iter):
            runner.val_loop.run()

    @master_only
    def after_val(self, runner: Runner) -> None:
        Path(runner.work_dir, NOTE).write_text(str(runner.iter))


def _is_due(runner: Runner) -> bool:
    """Whether mmengine's training loops validate where the run is."""
    loop = runner.train_loop
    done, last = runner.iter, runner.max_iters
    if isinstance(loop, EpochBasedTrainLoop):
        done, last = runner.epoch, runner.max_epochs
        if runner.iter != done * len(loop.dataloader):
            return False
    interval = loop.dynamic_intervals[bisect(loop.dynamic_milestones, done + 1) - 1]
    return done >= loop.val_begin and (done % interval == 0 or done == last)
