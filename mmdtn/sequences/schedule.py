"""The learning rate of Long-Range Arena."""

from typing import Any

from mmengine.optim.scheduler import _ParamScheduler  # the base of all schedulers, which mmengine exports by this name
from mmengine.registry import PARAM_SCHEDULERS


@PARAM_SCHEDULERS.register_module()
class WarmupInverseSqrtLR(_ParamScheduler):
    """After t steps ``lr * min(1, t / warmup) / sqrt(max(t, warmup))``, where ``lr`` is the optimizer's.

    The first step, t = 0, has a learning rate of 0, as in Long-Range Arena.

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
