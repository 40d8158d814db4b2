"""What the backbones share: loading and freezing as MMDetection does it, and the normaliser of a block."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from mmengine.logging import MMLogger, print_log
from mmengine.model import BaseModule
from mmengine.registry import MODELS
from timm.layers import DropPath, trunc_normal_
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .. import checkpoints


def build_norm(cfg: dict[str, Any], channels: int) -> nn.Module:
    """A normaliser of the last dimension of ``B x H x W x C``, from a ``norm_cfg``."""
    cfg = dict(cfg)
    kind = cfg.pop('type')
    if kind == 'LN':
        return nn.LayerNorm(channels, **cfg)
    return MODELS.build(dict(type=kind, num_features=channels, **cfg))


def block_norm_cfg(cfg: dict[str, Any], num_heads: int, pool_size: int = 1) -> dict[str, Any]:
    """A ``norm_cfg`` with what it leaves to the block: heads and pool size of DTN, the eps of PVT and ViT for LN."""
    defaults: dict[str, dict] = {'DTN': dict(num_heads=num_heads, pool_size=pool_size), 'LN': dict(eps=1e-6)}
    return defaults.get(cfg['type'], {}) | cfg


def drop_path_rates(last: float, depth: int) -> list[float]:
    """Stochastic depth of each block, growing evenly from 0."""
    return [last * i / max(depth - 1, 1) for i in range(depth)]


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
        """Linear layers and embeddings from a truncated normal, or the pretrained file; DTN keeps its own start.

        ``dict(type='Pretrained', checkpoint=PATH_OR_URL)`` takes any file that :mod:`mmdtn.checkpoints` knows, and its
        options ``source``, ``warm_start`` and ``resize``.
        """
        if self.init_cfg is None:
            self.apply(_init)
            for name, parameter in self.named_parameters():
                if name.rpartition('.')[2] in ('pos_embed', 'cls_token', 'cls_pos'):
                    trunc_normal_(parameter, std=0.02)
            return
        if self.init_cfg.get('type') != 'Pretrained':
            super().init_weights()
            return
        options = dict(self.init_cfg)
        source, prefix = options.pop('checkpoint'), options.pop('prefix', '')
        options.pop('type')
        state = checkpoints.read(source)
        found = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
        if not found:
            raise ValueError(
                f'No key of {source} starts with {prefix!r}; its keys are like: {", ".join(list(state)[:3])}. '
                'Leave prefix out of init_cfg to have it found.'
            )
        try:
            ours, report = checkpoints.convert(found, self, **options)
        except ValueError as error:
            raise ValueError(f'{source} cannot fill {type(self).__name__}: {error}') from None
        self.load_state_dict(ours, strict=False)
        print_log(f'{type(self).__name__} from {source}: {report}', logger=MMLogger.get_current_instance())

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
    return F.pad(x, (0, right, 0, below)) if below or right else x


class Block(nn.Module):
    def __init__(
        self,
        channels: int,
        attn: nn.Module,
        mlp_ratio: float,
        drop_path: float,
        norm_cfg: dict[str, Any],
        conv: bool = False,
    ) -> None:
        super().__init__()
        self.norm1 = build_norm(norm_cfg, channels)
        self.attn = attn
        self.norm2 = build_norm(norm_cfg, channels)
        self.mlp = ConvMlp(channels, int(channels * mlp_ratio), conv)
        self.drop_path = DropPath(drop_path) if drop_path > 0 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop_path(self.attn(self.norm1(x)))
        return x + self.drop_path(self.mlp(self.norm2(x)))


class SpatialReductionAttention(nn.Module):
    """Every token attends to a map that a convolution has made ``sr_ratio`` times smaller a side."""

    def __init__(self, channels: int, num_heads: int, sr_ratio: int = 1, norm_eps: float = 1e-6) -> None:
        super().__init__()
        if channels % num_heads:
            raise ValueError(f'{num_heads} attention heads do not divide {channels} channels.')
        self.num_heads, self.sr_ratio = num_heads, sr_ratio
        self.q = nn.Linear(channels, channels)
        self.kv = nn.Linear(channels, 2 * channels)
        self.proj = nn.Linear(channels, channels)
        if sr_ratio > 1:
            self.sr = nn.Conv2d(channels, channels, sr_ratio, sr_ratio)
            self.norm = nn.LayerNorm(channels, eps=norm_eps)

    def forward(self, x: Tensor) -> Tensor:
        B, H, W, C = x.shape
        q = self.q(x).view(B, H * W, self.num_heads, -1).transpose(1, 2)
        if self.sr_ratio > 1:
            image = x.permute(0, 3, 1, 2)
            if min(H, W) < self.sr_ratio:  # the convolution drops a remainder, but needs one whole window
                image = F.pad(image, (0, max(0, self.sr_ratio - W), 0, max(0, self.sr_ratio - H)))
            x = self.norm(self.sr(image).permute(0, 2, 3, 1).contiguous())
        kv = self.kv(x).view(B, x.shape[1] * x.shape[2], 2, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, kv[0], kv[1])
        return self.proj(out.transpose(1, 2).reshape(B, H, W, C))


class ConvMlp(nn.Module):
    """Two linear layers; in version 2 with a 3 x 3 depthwise convolution between them."""

    def __init__(self, channels: int, hidden: int, conv: bool) -> None:
        super().__init__()
        self.fc1 = nn.Linear(channels, hidden)
        self.dwconv = nn.Conv2d(hidden, hidden, 3, padding=1, groups=hidden) if conv else None
        self.fc2 = nn.Linear(hidden, channels)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc1(x)
        if self.dwconv is not None:
            x = self.dwconv(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        return light_checkpoint(lambda hidden: self.fc2(F.gelu(hidden)), x)
