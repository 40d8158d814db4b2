"""Mixed precision where there is no GPU."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from mmengine.optim import OptimWrapper
from mmengine.registry import OPTIM_WRAPPERS
from mmengine.runner import autocast
from torch import nn


@OPTIM_WRAPPERS.register_module()
class BFloat16OptimWrapper(OptimWrapper):
    """Runs the model under bfloat16 autocast. Its range is float32's, so the loss needs no scaling.

    mmengine's ``AmpOptimWrapper`` insists on a GPU, for its scaler.
    """

    @contextmanager
    def optim_context(self, model: nn.Module) -> Iterator[None]:
        with super().optim_context(model), autocast(dtype=torch.bfloat16):
            yield
