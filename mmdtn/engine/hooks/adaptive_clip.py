"""Hook for adaptive gradient clipping."""

from typing import Any

from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from mmengine.runner import Runner
from timm.utils import adaptive_clip_grad
from torch.optim import Optimizer


@HOOKS.register_module()
class AdaptiveClipHook(Hook):
    """Hook that clips gradients relative to the weights (arXiv 2102.06171), as in the training of LeViT.

    The gradient norm of each output unit is clipped to ``clip_factor`` times the norm of its weights. Weight norms
    below 1e-3 count as 1e-3.

    MMEngine calls no hook between the backward pass and the optimizer step, so the clipping happens in a step hook of
    torch's optimizer. At this point, every optimizer wrapper has accumulated and unscaled the gradients. Optimizers
    with ``fused=True`` are an exception, because they unscale gradients themselves after the hook.
    """

    def __init__(self, clip_factor: float = 0.01) -> None:
        if not clip_factor > 0:
            raise ValueError(f'clip_factor={clip_factor!r}: give a positive ratio of the norms, such as 0.01.')
        self.clip_factor = clip_factor

    def before_train(self, runner: Runner) -> None:
        runner.optim_wrapper.optimizer.register_step_pre_hook(self.clip)

    def clip(self, optimizer: Optimizer, *_: Any) -> None:
        adaptive_clip_grad((p for group in optimizer.param_groups for p in group['params']), self.clip_factor)
