"""Moving average of a model for self-distillation."""

import math

import torch
from mmengine.model import ExponentialMovingAverage
from torch import nn


class TeacherEMA(ExponentialMovingAverage):
    """Moving average of a student. Its momentum rises to 1 along a cosine.

    After optimizer step ``t`` of ``N``, the teacher becomes ``m_t * teacher + (1 - m_t) * student``, where ``m_t = 1 -
    (1 - momentum) * (1 + cos(pi * t / N)) / 2``. The teacher starts as a copy of the student and receives no gradients.
    Because it is always in evaluation mode, stochastic depth is disabled.

    Two existing classes are unsuitable: MMPretrain's ``CosineEMA`` only copies the student in the first step, and
    MMEngine's ``EMAHook`` swaps the weights of the two models for validation.

    Args:
        student: Module to average.
        momentum: Momentum at the first step.

    Attributes:
        steps: Number of updates so far. It is a buffer, so that a resumed run continues the schedule.
        total_steps: Number of updates in the whole training. :class:`DINOHook` sets this attribute.
    """

    total_steps: int | None = None

    def __init__(self, student: nn.Module, momentum: float = 0.996) -> None:
        if not 0 < momentum < 1:
            raise ValueError(f'momentum={momentum} is not between 0 and 1. Give the initial momentum, such as 0.996.')
        super().__init__(student, momentum=1 - momentum)
        self.eval()

    def train(self, mode: bool = True) -> 'TeacherEMA':
        return super().train(False)

    def copy(self, student: nn.Module) -> None:
        """Copies the weights of the student and resets the number of steps."""
        self.module.load_state_dict(student.state_dict())
        self.steps.zero_()

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        """Moves the parameters one step towards the student, and copies the buffers."""
        if self.total_steps is None:
            raise RuntimeError('TeacherEMA.total_steps is not set. Add dict(type="DINOHook") to custom_hooks.')
        share = self.momentum * (1 + math.cos(math.pi * int(self.steps) / self.total_steps)) / 2
        for mine, theirs in zip(self.module.parameters(), model.parameters(), strict=True):
            mine.lerp_(theirs, share)
        for buffer, source in zip(self.module.buffers(), model.buffers(), strict=True):
            buffer.copy_(source)
        self.steps += 1
