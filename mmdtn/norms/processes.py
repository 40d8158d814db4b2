"""Statistics of a batch that is spread over the processes of distributed training."""

from typing import Any

import torch
from mmengine.dist import all_reduce, get_world_size
from torch import Tensor


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
