"""What norms of batches share: running averages, a LayerNorm that they replace little by little, and processes."""

from typing import Any

import torch
from mmengine.dist import all_reduce, get_world_size
from torch import Tensor, nn

from .base import TokenNorm


class BatchStatisticsNorm(TokenNorm):
    """Learns statistics of batches in training; evaluation mode, and a backbone's ``norm_eval``, freeze them."""


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


class TaperingNorm(BatchStatisticsNorm):
    """``rho LN(x) + (1 - rho) y``: rho falls from 1 to 0 over ``taper_iters`` training steps, which ``count`` counts.

    Evaluation takes rho as it is.
    """

    count: Tensor
    taper_iters: int

    def prepare_taper(self, taper_iters: int) -> None:
        self.taper_iters = taper_iters
        self.repeatable = not taper_iters
        self.ln = nn.LayerNorm(self.num_features, eps=1e-6) if taper_iters else None
        self.register_buffer('count', torch.zeros((), dtype=torch.int64))

    def rho(self) -> Tensor:
        """LayerNorm's share, a tensor."""
        return (1 - self.count / max(self.taper_iters, 1)).clamp(min=0)

    def taper(self, x: Tensor, y: Tensor, rho: Tensor) -> Tensor:
        return y if self.ln is None else torch.lerp(y, self.ln(x).to(y.dtype), rho.to(y.dtype))

    def check_tapered(self) -> None:
        if self.count < self.taper_iters:
            raise RuntimeError(
                f'{type(self).__name__} is affine from taper_iters={self.taper_iters} training steps on, but has made '
                f'{int(self.count)}: LayerNorm still has a share in it.'
            )


def batch_mean(sums: Tensor, count: int, sync: bool) -> Tensor:
    """``sums`` over the ``count`` tokens of this process, divided by them; with ``sync``, of all processes.

    Each process may have another number of tokens. Gradients pass through.
    """
    if not sync or get_world_size() == 1:
        return sums / count
    together = _sum_of_processes(torch.cat((sums.flatten(), sums.new_full((1,), count))))
    return (together[:-1] / together[-1]).view(sums.shape)


@torch.compiler.disable
def _sum_of_processes(x: Tensor) -> Tensor:
    return _Sum.apply(x)


class _Sum(torch.autograd.Function):
    """torch.distributed has no public sum that passes gradients; its own is deprecated for a private one."""

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
