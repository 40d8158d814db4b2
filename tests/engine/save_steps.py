"""Hook for configs in tests that saves the gradients of the first step, and the losses."""

from pathlib import Path

import torch
from mmengine.hooks import Hook
from mmengine.registry import HOOKS


@HOOKS.register_module()
class SaveFirstGradients(Hook):
    def before_train(self, runner):
        step = runner.optim_wrapper.step
        saved = Path(runner.work_dir, f'gradients_{runner.rank}.pth')

        def save_and_step(*args, **kwargs):
            if not saved.exists():
                named = runner.model.named_parameters()
                torch.save({name.removeprefix('module.'): p.grad.clone() for name, p in named}, saved)
            step(*args, **kwargs)

        runner.optim_wrapper.step = save_and_step
