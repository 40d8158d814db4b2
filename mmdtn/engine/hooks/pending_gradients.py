"""Gradients that accumulate over iterations, in checkpoints."""

from mmengine.dist import get_world_size
from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from mmengine.runner import Runner
from torch import Tensor


@HOOKS.register_module()
class PendingGradientsHook(Hook):
    """Saves the gradients that accumulate towards the next step of the optimizer, and goes on from them.

    With several processes each has gradients of its own, of which a checkpoint has no place; none is saved then.
    """

    loaded: dict[str, Tensor] = {}  # noqa: RUF012  # never written to

    def before_save_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        gradients = {name: p.grad.cpu() for name, p in runner.model.named_parameters() if p.grad is not None}
        if gradients and get_world_size() == 1:  # between steps mmengine leaves no gradient
            checkpoint['pending_gradients'] = gradients

    def after_load_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        self.loaded = checkpoint.get('pending_gradients', {})

    def before_train(self, runner: Runner) -> None:
        for name, parameter in runner.model.named_parameters():
            if runner.iter and name in self.loaded:
                parameter.grad = self.loaded[name].to(parameter)
