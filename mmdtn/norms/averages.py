"""What PowerNorm and UN share: averages over iterations in both directions, outside autograd and compilers."""

import torch
from torch import Tensor, nn

from .base import BatchStatisticsNorm


class MovingAverageNorm(BatchStatisticsNorm):
    """Normalises by what earlier batches were like, and keeps averages of gradients as well.

    State moves in the forward and in the backward pass of a step: no checkpointing. ``torch.compile`` leaves the
    training step of such a layer as it is, so the model needs ``fullgraph=False``, the default.
    """

    repeatable = False
    count: Tensor

    def __init__(self, num_features: int, eps: float, warmup_iters: int) -> None:
        super().__init__(num_features, eps)
        self.warmup_iters = warmup_iters
        self.weight = nn.Parameter(torch.ones(num_features))
        self.bias = nn.Parameter(torch.zeros(num_features))
        self.register_buffer('count', torch.zeros((), dtype=torch.int64))


def start_new_task(model: nn.Module) -> None:
    """The norms of a model with weights from elsewhere count from 0 again: they warm up on the new data too."""
    for module in model.modules():
        if isinstance(module, MovingAverageNorm):
            module.count.zero_()
