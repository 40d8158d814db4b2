"""Classes for configs in tests: a transform that spoils an image, and hooks that print the precision or slow a step
down.
"""

import time
from pathlib import Path

import numpy as np
from mmcv.transforms import BaseTransform
from mmengine.hooks import Hook
from mmengine.registry import HOOKS, TRANSFORMS
from torch import nn


@TRANSFORMS.register_module()
class Spoil(BaseTransform):
    def __init__(self, name):
        self.name = name

    def transform(self, results):
        results['img'] = results['img'].astype(np.float32)
        if Path(results['img_path']).name == self.name:
            results['img'][3, 3] = np.nan
        return results


@HOOKS.register_module()
class SeeDtypes(Hook):
    def before_train(self, runner):
        layer = next(module for module in runner.model.modules() if isinstance(module, nn.Conv2d))

        def see(module, inputs, output):
            handle.remove()
            runner.logger.info(f'SeeDtypes: convolution {output.dtype}, weight {module.weight.dtype}')

        handle = layer.register_forward_hook(see)


@HOOKS.register_module()
class SlowStep(Hook):
    def __init__(self, number):
        self.number = number

    def before_train_iter(self, runner, *args, **kwargs):
        if runner.iter + 1 == self.number:
            time.sleep(4)
