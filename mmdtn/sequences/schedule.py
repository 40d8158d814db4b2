"""Learning-rate schedule of Long-Range Arena."""

from typing import Any

from mmengine.optim.scheduler import _ParamScheduler  # mmengine has no public name for this class
from mmengine.registry import PARAM_SCHEDULERS


@PARAM_SCHEDULERS.register_module()
class WarmupInverseSqrtLR(_ParamScheduler):
    """Scheduler with linear warm-up and inverse-square-root decay of the learning rate.

    The learning rate after t steps is ``lr * min(1, t / warmup) / sqrt(max(t, warmup))``. In this formula, ``lr`` is
    the optimizer's learning rate. As in Long-Range Arena, the first step has t = 0 and therefore a learning rate of 0.

    Example:
        param_scheduler = [dict(type='WarmupInverseSqrtLR', warmup=1000, by_epoch=False)]
    """

    def __init__(self, optimizer: Any, warmup: int = 1000, **kwargs: Any) -> None:
        self.warmup = warmup
        super().__init__(optimizer, 'lr', **kwargs)

    def _get_value(self) -> list[float]:
        t = self.last_step
        factor = min(1, t / self.warmup) / max(t, self.warmup) ** 0.5
        return [base * factor for base in self.base_values]
