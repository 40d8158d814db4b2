"""Hook that logs the lambdas and neighbourhoods of DTN layers during training."""

from functools import partial
from typing import Any

import torch
from mmengine.hooks import Hook
from mmengine.model import is_model_wrapper
from mmengine.registry import HOOKS
from mmengine.runner import Runner
from torch import Tensor

from mmdtn.norms import DTN, DTN2d


@HOOKS.register_module()
class DTNMonitorHook(Hook):
    """Hook that logs the lambdas and the effective neighbourhood of each head in each DTN layer.

    The visualizer receives the scalars ``dtn/LAYER/lambda_mean/HEAD``, ``dtn/LAYER/lambda_var/HEAD`` and
    ``dtn/LAYER/distance/HEAD``. The last scalar is the mean distance, in tokens, between a token and the tokens that P
    mixes into its statistics. The distance is measured on the grid of the last batch. The hook does not slow down the
    iterations between two logs.

    Args:
        interval: Number of iterations between two logs.

    Example:
        custom_hooks = [dict(type='DTNMonitorHook', interval=500)]
    """

    priority = 'BELOW_NORMAL'

    def __init__(self, interval: int = 100) -> None:
        self.interval = interval

    def before_train_iter(self, runner: Runner, *args: Any, **kwargs: Any) -> None:
        if not self.every_n_train_iters(runner, self.interval):
            return
        model = runner.model.module if is_model_wrapper(runner.model) else runner.model
        self.layers = {name: module for name, module in model.named_modules() if isinstance(module, DTN)}
        self.grids: dict[str, tuple[int, int]] = {}
        self.handles = [
            layer.register_forward_hook(partial(self._note_grid, name), with_kwargs=True)
            for name, layer in self.layers.items()
        ]

    def _note_grid(self, name: str, layer: DTN, args: tuple, kwargs: dict, output: Tensor) -> None:
        self.grids[name] = _grid(layer, *args, **kwargs)

    @torch.no_grad()
    def after_train_iter(self, runner: Runner, *args: Any, **kwargs: Any) -> None:
        if not self.every_n_train_iters(runner, self.interval):
            return
        for handle in self.handles:
            handle.remove()
        from mmdtn.analysis.neighbourhood import lambdas, mean_distance  # needed only in runs with this hook

        scalars: dict[str, float] = {}
        for name, (height, width) in self.grids.items():
            layer = self.layers[name]
            values = dict(zip(('lambda_mean', 'lambda_var'), lambdas(layer), strict=True))
            values['distance'] = mean_distance(layer, height, width)
            for kind, by_head in values.items():
                scalars |= {f'dtn/{name}/{kind}/{head}': value for head, value in enumerate(by_head.tolist())}
        runner.visualizer.add_scalars(scalars, step=runner.iter + 1)


def _grid(
    layer: DTN, x: Tensor, hw_shape: tuple[int, int] | None = None, num_prefix_tokens: int = 0
) -> tuple[int, int]:
    height, width = x.shape[2:4] if isinstance(layer, DTN2d) else hw_shape or x.shape[1:3]
    return height, width
