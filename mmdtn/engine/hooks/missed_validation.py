"""Hook that runs the validation that a killed run left unfinished."""

from bisect import bisect
from pathlib import Path

from mmengine.dist import broadcast_object_list, master_only
from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from mmengine.runner import EpochBasedTrainLoop, Runner

NOTE = 'last_validation'  # file in the work directory with the iteration of the last finished validation


@HOOKS.register_module()
class MissedValidationHook(Hook):
    """Hook that starts a resumed run with a validation if its checkpoint was not completely validated.

    MMEngine saves checkpoints before validating, but a resumed run continues after the validation. Without this hook,
    the metrics of this checkpoint would be missing in the log, and ``save_best`` would not consider the checkpoint. A
    run killed during its final validation would have no result.

    The validation runs in ``before_train``, because mmengine's loops call no other hook before they start the next
    epoch or end.
    """

    priority = 'LOWEST'  # runs after the other hooks are set up

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
    """Returns whether mmengine's training loop validates at the current iteration."""
    loop = runner.train_loop
    done, last = runner.iter, runner.max_iters
    if isinstance(loop, EpochBasedTrainLoop):
        done, last = runner.epoch, runner.max_epochs
        if runner.iter != done * len(loop.dataloader):
            return False
    interval = loop.dynamic_intervals[bisect(loop.dynamic_milestones, done + 1) - 1]
    return done >= loop.val_begin and (done % interval == 0 or done == last)
