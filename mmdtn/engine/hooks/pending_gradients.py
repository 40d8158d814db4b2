"""Hook that saves accumulated gradients in checkpoints."""

from mmengine.dist import get_world_size
from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from mmengine.runner import Runner
from torch import Tensor


@HOOKS.register_module()
class PendingGradientsHook(Hook):
    """Hook that saves the gradients accumulated for the next optimizer step, and restores them in a resumed run.

    With several processes, the hook saves nothing, because a checkpoint holds the gradients of only one process.
    """

    loaded: dict[str, Tensor] = {}  # noqa: RUF012  # never modified

    def before_save_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        gradients = {name: p.grad.cpu() for name, p in runner.model.named_parameters() if p.grad is not None}
        if gradients and get_world_size() == 1:  # mmengine clears gradients after each step
            checkpoint['pending_gradients'] = gradients

    def after_load_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        self.loaded = checkpoint.get('pending_gradients', {})

    def before_train(self, runner: Runner) -> None:
        for name, parameter in runner.model.named_parameters():
            if runner.iter and name in self.loaded:
                parameter.grad = self.loaded[name].to(parameter)
