"""The teacher of a self-distillation."""

import math

import torch
from mmengine.model import ExponentialMovingAverage
from torch import nn


class TeacherEMA(ExponentialMovingAverage):
    """Moving average of a student whose momentum rises to 1 along a cosine.

    After optimizer step ``t`` of ``N``, ``teacher = m_t * teacher + (1 - m_t) * student`` with
    ``m_t = 1 - (1 - momentum) * (1 + cos(pi * t / N)) / 2``. The teacher starts as a copy of the student, takes part in
    no backward pass, and is always in evaluation mode, so that it has no stochastic depth.

    MMPretrain's ``CosineEMA`` counts its first call, which only copies the student, as a step. mmengine's ``EMAHook``
    exchanges the weights of the two models for validation.

    Args:
        student: The module to average.
        momentum: The share of the teacher that is kept after the first step.

    Attributes:
        steps: Number of updates. It is a buffer, so that a resumed run continues the schedule.
        total_steps: Number of updates of the whole training. :class:`DINOHook` sets it.
    """

    total_steps: int | None = None

    def __init__(self, student: nn.Module, momentum: float = 0.996) -> None:
        if not 0 < momentum < 1:
            raise ValueError(
                f'momentum={momentum}: the share of the teacher that is kept is between 0 and 1, as 0.996.'
            )
        super().__init__(student, momentum=1 - momentum)
        self.eval()

    def train(self, mode: bool = True) -> 'TeacherEMA':
        return super().train(False)

    def copy(self, student: nn.Module) -> None:
        """Starts anew from the student's weights."""
        self.module.load_state_dict(student.state_dict())
        self.steps.zero_()

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        """Takes one step towards the student; buffers are copied."""
        if self.total_steps is None:
            raise RuntimeError('TeacherEMA.total_steps is not set: add dict(type="DINOHook") to custom_hooks.')
        share = self.momentum * (1 + math.cos(math.pi * int(self.steps) / self.total_steps)) / 2
        for mine, theirs in zip(self.module.parameters(), model.parameters(), strict=True):
            mine.lerp_(theirs, share)
        for buffer, source in zip(self.module.buffers(), model.buffers(), strict=True):
            buffer.copy_(source)
        self.steps += 1
