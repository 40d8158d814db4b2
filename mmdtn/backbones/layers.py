"""Layers that backbones share, on maps ``B x H x W x C``."""

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from timm.layers import DropPath
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mmdtn.norms import Place, build_norm


def drop_path_rates(last: float, depth: int) -> list[float]:
    """Stochastic depth of each block, growing evenly from 0."""
    return [last * i / max(depth - 1, 1) for i in range(depth)]


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
        place: Place,
        conv: bool = False,
    ) -> None:
        super().__init__()
        self.norm1 = build_norm(norm_cfg, channels, place)
        self.attn = attn
        self.norm2 = build_norm(norm_cfg, channels, place)
        self.mlp = ConvMlp(channels, int(channels * mlp_ratio), conv)
        self.drop_path = DropPath(drop_path) if drop_path > 0 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop_path(self.attn(self.norm1(x)))
        return x + self.drop_path(self.mlp(self.norm2(x)))


class Attention(nn.Module):
    """Every token attends to all of its map, or to what a convolution has made ``sr_ratio`` times smaller a side."""

    def __init__(
        self, channels: int, num_heads: int, sr_ratio: int = 1, norm_eps: float = 1e-6, qkv_bias: bool = True
    ) -> None:
        super().__init__()
        if channels % num_heads:
            raise ValueError(f'{num_heads} attention heads do not divide {channels} channels.')
        self.num_heads, self.sr_ratio = num_heads, sr_ratio
        self.q = nn.Linear(channels, channels, bias=qkv_bias)
        self.kv = nn.Linear(channels, 2 * channels, bias=qkv_bias)
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
