"""Adaptive gradient clipping."""

from typing import Any

from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from mmengine.runner import Runner
from timm.utils import adaptive_clip_grad
from torch.optim import Optimizer


@HOOKS.register_module()
class AdaptiveClipHook(Hook):
    """Shortens gradients that are long beside their weights (arXiv 2102.06171), as LeViT was trained.

    What leads to one output of a layer has a gradient of at most ``clip_factor`` times its own length; a length of less
    than 1e-3 counts as that.

    mmengine calls no hook between the backward part and the optimizer's step, so a step hook of torch's optimizer
    clips. That fits every optimizer wrapper: gradients have accumulated by then, and a loss scale is out of them,
    except with optimizers of ``fused=True``, which take it out themselves.
    """

    def __init__(self, clip_factor: float = 0.01) -> None:
        if not clip_factor > 0:
            raise ValueError(f'clip_factor={clip_factor!r}: give the largest ratio of gradient to weights, as 0.01.')
        self.clip_factor = clip_factor

    def before_train(self, runner: Runner) -> None:
        runner.optim_wrapper.optimizer.register_step_pre_hook(self.clip)

    def clip(self, optimizer: Optimizer, *_: Any) -> None:
        adaptive_clip_grad((p for group in optimizer.param_groups for p in group['params']), self.clip_factor)
