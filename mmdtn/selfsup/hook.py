"""Hook that clips the gradients of DINO and updates its teacher."""

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
    """Hook that clips gradients before each optimizer step, and then updates the teacher of :class:`DINO`.

    Clipping happens in a pre-step hook of torch's optimizer, which works with every optimizer wrapper. When the
    pre-step hook runs, the gradients have been accumulated and unscaled. The only exception is an optimizer with
    ``fused=True`` and a gradient scaler, because such an optimizer unscales gradients itself.

    Args:
        clip_grad: Maximum norm of the gradient of each single parameter. None disables clipping.
        frozen_last_layer: Number of epochs in which the head's last layer is frozen. The layer then has no gradients,
            so the optimizer skips it and applies no weight decay.
        warmup_temp: Temperature of the teacher in the first epoch.
        warmup_epochs: Number of epochs in which the temperature changes linearly to the model's ``teacher_temp``.

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
            raise ValueError(f'clip_grad={clip_grad} is not positive. Give the maximum norm, such as 3.0, or None.')
        self.clip_grad = clip_grad
        self.frozen_last_layer = frozen_last_layer
        self.warmup_temp = warmup_temp
        self.warmup_epochs = warmup_epochs

    def before_train(self, runner: Runner) -> None:
        self.runner = runner
        self.model = _unwrapped(runner.model)
        if not isinstance(self.model, DINO):
            raise UserError(f'DINOHook requires a model of type DINO, but the config has {type(self.model).__name__}.')
        self.final_temp = self.model.teacher_temp
        iterations = runner.cfg.get('optim_wrapper', {}).get('accumulative_counts', 1)
        self.model.teacher.total_steps = math.ceil(runner.max_iters / iterations)
        if runner.iter == 0:  # load_from may have loaded the update count of another run
            self.model.teacher.steps.zero_()
        self.handle = runner.optim_wrapper.optimizer.register_step_pre_hook(self.prepare_gradients)
        entropy = math.log(len(self.model.centre))
        runner.logger.info(
            f'teacher_entropy is at most {entropy:.3f}. If it approaches 0 or this value, the teacher collapses.'
        )

    def after_train(self, runner: Runner) -> None:
        self.handle.remove()
        self.model.teacher_temp = self.final_temp

    @property
    def epoch(self) -> int:
        """Number of finished passes over the data, which MMEngine's iteration-based loops do not count."""
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
        if runner.optim_wrapper.should_update():  # False while gradients accumulate
            self.model.teacher.update_parameters(self.model.student)


def _unwrapped(model: nn.Module) -> Any:
    return model.module if is_model_wrapper(model) else model
