"""What DINO does around the optimizer's steps."""

import math
from typing import Any

import torch
from mmengine.hooks import Hook
from mmengine.model import is_model_wrapper
from mmengine.registry import HOOKS
from mmengine.runner import Runner
from torch import nn
from torch.nn.utils import clip_grad_norm_

from mmdtn.errors import UserError

from .dino import DINO


@HOOKS.register_module()
class DINOHook(Hook):
    """Moves the teacher of :class:`DINO` after each step of the optimizer, and prepares the gradients before it.

    The gradients are prepared in a step hook of torch's optimizer. It runs with every optimizer wrapper: gradients have
    accumulated by then, and a loss scale has been divided out, except for optimizers with ``fused=True`` next to a loss
    scale.

    Args:
        clip_grad: Largest norm of the gradient of each single parameter. None: no limit.
        frozen_last_layer: For so many epochs the gradients of the head's last layer are dropped. The optimizer skips
            the layer then, so that it has no weight decay either.
        warmup_temp: Temperature of the teacher in the first epoch.
        warmup_epochs: Number of epochs in which the temperature rises linearly to the model's ``teacher_temp``.

    Example:
        custom_hooks = [dict(type='DINOHook', warmup_temp=0.04, warmup_epochs=30)]
    """

    def __init__(
        self,
        clip_grad: float | None = 3.0,
        frozen_last_layer: int = 1,
        warmup_temp: float = 0.04,
        warmup_epochs: int = 0,
    ) -> None:
        if clip_grad is not None and not clip_grad > 0:
            raise ValueError(f'clip_grad={clip_grad}: give the largest norm of a gradient, as 3.0, or None.')
        self.clip_grad = clip_grad
        self.frozen_last_layer = frozen_last_layer
        self.warmup_temp = warmup_temp
        self.warmup_epochs = warmup_epochs

    def before_train(self, runner: Runner) -> None:
        self.runner = runner
        self.model = _unwrapped(runner.model)
        if not isinstance(self.model, DINO):
            raise UserError(f'DINOHook is for a model of type DINO, but the config has {type(self.model).__name__}.')
        self.final_temp = self.model.teacher_temp
        iterations = runner.cfg.get('optim_wrapper', {}).get('accumulative_counts', 1)
        self.model.teacher.total_steps = math.ceil(runner.max_iters / iterations)
        if runner.iter == 0:  # weights of another training may have been loaded, with its number of updates
            self.model.teacher.steps.zero_()
        self.handle = runner.optim_wrapper.optimizer.register_step_pre_hook(self.prepare_gradients)
        entropy = math.log(len(self.model.centre))
        runner.logger.info(f'teacher_entropy is at most {entropy:.3f}; close to this or to 0, the teacher collapses.')

    def after_train(self, runner: Runner) -> None:
        self.handle.remove()
        self.model.teacher_temp = self.final_temp

    @property
    def epoch(self) -> int:
        """Passes over the data so far. mmengine's loops by iterations do not count them."""
        return self.runner.iter // len(self.runner.train_dataloader)

    def before_train_iter(self, *args: Any, **kwargs: Any) -> None:
        if self.epoch < self.warmup_epochs:
            done = self.epoch / max(self.warmup_epochs - 1, 1)
            self.model.teacher_temp = self.warmup_temp + done * (self.final_temp - self.warmup_temp)
        else:
            self.model.teacher_temp = self.final_temp

    @torch.no_grad()
    def prepare_gradients(self, *args: Any) -> None:
        if self.clip_grad is not None:
            for parameter in self.model.student.parameters():
                clip_grad_norm_(parameter, self.clip_grad)
        if self.epoch < self.frozen_last_layer:
            for parameter in self.model.student.head.last_layer.parameters():
                parameter.grad = None

    def after_train_iter(self, runner: Runner, *args: Any, **kwargs: Any) -> None:
        if runner.optim_wrapper.should_update():  # not between two steps, while gradients accumulate
            self.model.teacher.update_parameters(self.model.student)


def _unwrapped(model: nn.Module) -> Any:
    return model.module if is_model_wrapper(model) else model
