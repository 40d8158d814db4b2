"""Base classes of norms with batch statistics, and averages over the processes of a distributed run."""

from typing import Any

import torch
from mmengine.dist import all_reduce, get_world_size
from torch import Tensor, nn

from .base import TokenNorm


class BatchStatisticsNorm(TokenNorm):
    """Norm with running statistics that training updates. Evaluation mode and ``norm_eval`` freeze the statistics."""


class MovingAverageNorm(BatchStatisticsNorm):
    """Norm that uses the statistics of earlier batches, and keeps moving averages of gradients.

    The forward and backward passes of a training step change the state, so activation checkpointing is not possible.
    ``torch.compile`` skips the training step, so ``fullgraph`` must be False, the default.
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
    """Resets the step counters of a model with pretrained weights, so that its norms warm up on the new data."""
    for module in model.modules():
        if isinstance(module, MovingAverageNorm):
            module.count.zero_()


class TaperingNorm(BatchStatisticsNorm):
    """Norm that computes ``rho LN(x) + (1 - rho) y``, where rho falls from 1 to 0 over ``taper_iters`` steps.

    ``count`` is the number of completed training steps. Evaluation uses the current rho.
    """

    count: Tensor
    taper_iters: int

    def prepare_taper(self, taper_iters: int) -> None:
        self.taper_iters = taper_iters
        self.repeatable = not taper_iters
        self.ln = nn.LayerNorm(self.num_features, eps=1e-6) if taper_iters else None
        self.register_buffer('count', torch.zeros((), dtype=torch.int64))

    def rho(self) -> Tensor:
        """Returns the share of LayerNorm as a tensor."""
        return (1 - self.count / max(self.taper_iters, 1)).clamp(min=0)

    def taper(self, x: Tensor, y: Tensor, rho: Tensor) -> Tensor:
        return y if self.ln is None else torch.lerp(y, self.ln(x).to(y.dtype), rho.to(y.dtype))

    def check_tapered(self) -> None:
        if self.count < self.taper_iters:
            raise RuntimeError(
                f'{type(self).__name__} becomes affine after taper_iters={self.taper_iters} training steps, but has '
                f'made only {int(self.count)}. Until then, it contains a LayerNorm.'
            )


def batch_mean(sums: Tensor, count: int, sync: bool) -> Tensor:
    """Divides sums over tokens by the number of tokens. With ``sync``, the average covers all processes.

    The processes may have different numbers of tokens. The result is differentiable.
    """
    if not sync or get_world_size() == 1:
        return sums / count
    together = _sum_of_processes(torch.cat((sums.flatten(), sums.new_full((1,), count))))
    return (together[:-1] / together[-1]).view(sums.shape)


@torch.compiler.disable
def _sum_of_processes(x: Tensor) -> Tensor:
    return _Sum.apply(x)


class _Sum(torch.autograd.Function):
    """Differentiable sum over processes, for which torch.distributed has no public function."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        total = x.clone()
        all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        total = grad.clone()
        all_reduce(total)
        return total
