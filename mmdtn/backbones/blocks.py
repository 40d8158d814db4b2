"""What the backbones share: loading and freezing as MMDetection does it, and the normaliser of a block."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from mmengine.logging import MMLogger, print_log
from mmengine.model import BaseModule
from mmengine.registry import MODELS
from mmengine.runner.checkpoint import CheckpointLoader
from timm.layers import trunc_normal_
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def build_norm(cfg: dict[str, Any], channels: int) -> nn.Module:
    """A normaliser of the last dimension of ``B x H x W x C``, from a ``norm_cfg``."""
    cfg = dict(cfg)
    kind = cfg.pop('type')
    if kind == 'LN':
        return nn.LayerNorm(channels, **cfg)
    return MODELS.build(dict(type=kind, num_features=channels, **cfg))


class Backbone(BaseModule):
    """Start, pretrained weights and freezing; a subclass says what its stages are."""

    def __init__(self, frozen_stages: int, norm_eval: bool, init_cfg: dict | None) -> None:
        super().__init__(init_cfg)
        self.frozen_stages = frozen_stages
        self.norm_eval = norm_eval

    def frozen_parts(self) -> Iterable[nn.Module | nn.Parameter]:
        """What ``frozen_stages`` holds still: 0 the first patch embedding, n also the first n stages."""
        raise NotImplementedError

    def init_weights(self) -> None:
        """Linear layers and embeddings from a truncated normal, or the pretrained file; DTN keeps its own start."""
        if self.init_cfg is None:
            self.apply(_init)
            for name, parameter in self.named_parameters():
                if name.rpartition('.')[2] in ('pos_embed', 'cls_token', 'cls_pos'):
                    trunc_normal_(parameter, std=0.02)
            return
        if self.init_cfg.get('type') != 'Pretrained':
            super().init_weights()
            return
        checkpoint = CheckpointLoader.load_checkpoint(self.init_cfg['checkpoint'], map_location='cpu')
        state = checkpoint.get('state_dict', checkpoint.get('model', checkpoint))
        prefix = self.init_cfg.get('prefix', '')
        found = {key[len(prefix) :]: value for key, value in state.items() if key.startswith(prefix)}
        if not found:
            some = ', '.join(list(state)[:3])
            raise ValueError(
                f'No key of {self.init_cfg["checkpoint"]} starts with {prefix!r}; its keys are like: {some}. '
                "What MMPretrain or MMDetection saved wants init_cfg=dict(..., prefix='backbone.')."
            )
        result = self.load_state_dict(found, strict=False)
        missing, unexpected = result.missing_keys, result.unexpected_keys
        print_log(
            f'{type(self).__name__} took {len(found) - len(unexpected)} tensors from {self.init_cfg["checkpoint"]}: '
            f'{len(missing)} missing {missing}, {len(unexpected)} unexpected {unexpected}',
            logger=MMLogger.get_current_instance(),
        )

    def train(self, mode: bool = True) -> 'Backbone':
        super().train(mode)
        if self.frozen_stages >= 0:
            for part in self.frozen_parts():
                part.requires_grad_(False)
                if isinstance(part, nn.Module):
                    part.eval()
        if mode and self.norm_eval:
            for module in self.modules():
                if isinstance(module, nn.modules.batchnorm._NormBase):
                    module.eval()
        return self


@torch.no_grad()
def _init(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, mode='fan_out')
        if module.bias is not None:
            nn.init.zeros_(module.bias)


def light_checkpoint(run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """``run(x)`` that keeps only ``x``, for something cheap that ends in a linear layer.

    The wide activation in front of the second linear layer of an MLP is the largest tensor of a block. Computing it
    again stops short of the linear layer itself.
    """
    if not x.requires_grad:
        return run(x)
    return checkpoint(run, x, use_reentrant=False, preserve_rng_state=False)


def pad_to_multiple(x: Tensor, height: int, width: int) -> Tensor:
    """Zeros below and to the right of ``B x C x H x W`` until ``height`` and ``width`` divide it."""
    below, right = -x.shape[2] % height, -x.shape[3] % width
    return nn.functional.pad(x, (0, right, 0, below)) if below or right else x
