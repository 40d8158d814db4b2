"""T2T-ViT, a Vision Transformer that computes its tokens with three soft splits and two small attention layers."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from mmengine.registry import MODELS
from timm.layers import resample_abs_pos_embed_nhwc
from torch import Tensor, nn

from mmdtn.checkpoints.t2t import sines
from mmdtn.norms import Place, build_norm

from .base import architecture, check_other_norms
from .folding import FusesNorms, Neighbour, fold_into
from .vit import PlainBackbone, ViTOptions

Split = tuple[int, int, int]  # kernel, stride, padding
SPLITS: tuple[Split, ...] = ((7, 4, 2), (3, 2, 1), (3, 2, 1))
TOKEN_WIDTH = 64
EPS = 1e-5
RANDOM_FEATURES = 32
# TokenPerformer scales numerator and denominator by this factor, so that the constant 1e-8 survives export to ONNX.
# The rewriter of onnxscript treats constants up to 1e-8 as 0, which caused errors of 5% in tokens with tiny attention
# weights. The factor is a power of two, so it causes no rounding errors.
UP = 2.0**20


@MODELS.register_module()
class T2TViTDTN(PlainBackbone):
    """T2T-ViT (arXiv 2101.11986) with DTN in its first blocks, on maps ``B x H x W x C``.

    The grid of the token module before the blocks has sides of up to a fourth of the image's sides, and is too large
    for DTN. By default, the position embedding is a fixed table of sines.

    Args:
        arch: ``'t-14' | 't-19' | 't-24'``, whose token module has transformer layers; ``'7' | '10' | '12' | '14' |
            '19' | '24' | '14-resnext' | '14-wide'``, whose token module has performer layers; or a dict of the fields
            of ``ARCHS``. A dict with a name under ``'base'`` needs only the fields that differ from that architecture.
        img_size: Side of the images that determines the size of the position table. The table is resized for images
            of other sizes.
        in_channels: Channels of the image.
        learned_positions: If True, the position embedding is a parameter, initialised with the table of sines. It is
            needed for files with other position embeddings.
        options: Fields of :class:`ViTOptions`. ``frozen_stages=0`` freezes the token module.

    Example:
        >>> (features,) = T2TViTDTN('t-14')(torch.randn(1, 3, 64, 96))
        >>> (maps,) = T2TViTDTN('t-14', out_type='featmap')(torch.randn(1, 3, 64, 96))
        >>> features.shape, maps.shape
        (torch.Size([1, 384]), torch.Size([1, 384, 4, 6]))
    """

    def __init__(
        self,
        arch: str | dict = 't-14',
        img_size: int = 224,
        in_channels: int = 3,
        learned_positions: bool = False,
        **options: Any,
    ) -> None:
        a, shared = architecture(arch, ARCHS), ViTOptions(**options)
        side = tokens_along(img_size, SPLITS)
        norm_cfg = check_other_norms(shared.other_norm_cfg)
        tokens = TokensToToken(in_channels, a['width'], a['performer'], norm_cfg=norm_cfg)
        pos_embed = sines(1 + side * side, a['width'])[1:].view(1, side, side, -1)  # row 0 belongs to the class token
        if learned_positions:
            pos_embed = nn.Parameter(pos_embed)
        super().__init__(a, tokens, pos_embed, shared, eps=EPS, qkv_bias=False)

    def init_weights(self) -> None:
        super().init_weights()
        if self.init_cfg is not None:
            return
        with torch.no_grad():
            if self.cls_from is not None:
                self.cls_token.add_(sines(1, self.num_features).to(self.cls_token))
            if isinstance(self.pos_embed, nn.Parameter):
                table = sines(1 + self.pos_embed.shape[1:3].numel(), self.num_features)[1:]
                self.pos_embed.copy_(table.view_as(self.pos_embed))

    def tokens(self, images: Tensor) -> Tensor:
        x = self.patch_embed(images)
        return x + resample_abs_pos_embed_nhwc(self.pos_embed, list(x.shape[1:3]), antialias=False)


class TokensToToken(nn.Module):
    """Token module that converts images ``B x C x H x W`` to tokens ``B x h x w x width``.

    Three soft splits combine overlapping patches of tokens. An attention layer follows each of the first two splits.
    """

    def __init__(
        self,
        in_channels: int,
        width: int,
        performer: bool,
        splits: Sequence[Split] = SPLITS,
        norm_cfg: dict = dict(type='LN'),  # noqa: B006
    ) -> None:
        super().__init__()
        self.splits = splits
        layer = TokenPerformer if performer else TokenTransformer
        first, second, third = (kernel * kernel for kernel, _, _ in splits)
        self.attention1 = layer(in_channels * first, TOKEN_WIDTH, norm_cfg)
        self.attention2 = layer(TOKEN_WIDTH * second, TOKEN_WIDTH, norm_cfg)
        self.project = nn.Linear(TOKEN_WIDTH * third, width)

    def forward(self, x: Tensor) -> Tensor:
        for split, layer in zip(self.splits, (self.attention1, self.attention2, self.project), strict=True):
            x = layer(soft_split(x, *split)).permute(0, 3, 1, 2)
        return x.permute(0, 2, 3, 1)


def soft_split(x: Tensor, kernel: int, stride: int, padding: int) -> Tensor:
    """Splits a map ``B x C x H x W`` into overlapping patches, which are tokens ``B x h x w x (C kernel kernel)``."""
    height, width = (tokens_along(side, [(kernel, stride, padding)]) for side in x.shape[2:])
    return F.unfold(x, kernel, stride=stride, padding=padding).transpose(1, 2).unflatten(1, (height, width))


def tokens_along(side: int, splits: Sequence[Split]) -> int:
    """Returns the number of tokens along a side after all splits."""
    for kernel, stride, padding in splits:
        side = (side + 2 * padding - kernel) // stride + 1
    return side


class TokenLayer(FusesNorms):
    """Transformer layer with one head that changes the width.

    The first residual connection adds the attention's values, because the width of the input differs.
    """

    def __init__(self, in_channels: int, channels: int, bias: bool, drop: float, norm_cfg: dict[str, Any]) -> None:
        super().__init__()
        self.norm1 = build_norm(norm_cfg, in_channels, Place(eps=EPS))
        self.qkv = nn.Linear(in_channels, 3 * channels, bias=bias)
        self.proj = nn.Linear(channels, channels)
        self.norm2 = build_norm(norm_cfg, channels, Place(eps=EPS))
        self.fc1 = nn.Linear(channels, channels)
        self.fc2 = nn.Linear(channels, channels)
        self.drop = nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        grid = x.shape[1:3]
        q, k, v = self.qkv(self.norm1(x.flatten(1, 2))).chunk(3, -1)
        x = v + self.drop(self.proj(self.attend(q, k, v)))
        x = x + self.drop(self.fc2(F.gelu(self.fc1(self.norm2(x)))))
        return x.unflatten(1, grid)

    def neighbours(self) -> dict[str, Neighbour]:
        return dict(
            norm1=Neighbour('qkv', partial(fold_into, self.qkv)),
            norm2=Neighbour('fc1', partial(fold_into, self.fc1)),
        )

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Computes the attention. All tensors are ``B x T x C``."""
        raise NotImplementedError


class TokenTransformer(TokenLayer):
    def __init__(self, in_channels: int, channels: int, norm_cfg: dict = dict(type='LN')) -> None:  # noqa: B006
        super().__init__(in_channels, channels, bias=False, drop=0.0, norm_cfg=norm_cfg)
        self.scale = in_channels**-0.5  # input width instead of head width, as published

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t[:, None].contiguous() for t in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, scale=self.scale)[:, 0]


class TokenPerformer(TokenLayer):
    """Performer layer, in which attention uses random features of queries and keys (arXiv 2009.14794).

    The layer's cost is linear in the number of tokens.
    """

    features: Tensor

    def __init__(self, in_channels: int, channels: int, norm_cfg: dict = dict(type='LN')) -> None:  # noqa: B006
        super().__init__(in_channels, channels, bias=True, drop=0.1, norm_cfg=norm_cfg)
        directions = nn.init.orthogonal_(torch.empty(RANDOM_FEATURES, channels))
        self.register_buffer('features', directions * math.sqrt(RANDOM_FEATURES))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.autocast(q.device.type, enabled=False):  # exponentials of squares overflow in half precision
            precise = torch.promote_types(q.dtype, torch.float32)
            q, k = UP * self.random_features(q.to(precise)), self.random_features(k.to(precise))
            mixed = q @ (k.mT @ v.to(precise))
            return (mixed / (q @ k.sum(1)[..., None] + UP * 1e-8)).to(v.dtype)

    def random_features(self, x: Tensor) -> Tensor:
        exponent = x @ self.features.to(x.dtype).mT - x.square().sum(-1, keepdim=True) / 2
        return exponent.exp() / math.sqrt(RANDOM_FEATURES)


def _t2t(width: int, depth: int, num_heads: int, performer: bool = False, mlp_ratio: int = 3) -> dict[str, Any]:
    return dict(width=width, depth=depth, num_heads=num_heads, mlp_ratio=mlp_ratio, performer=performer)


ARCHS = {
    't-14': _t2t(384, 14, 6),
    't-19': _t2t(448, 19, 7),
    't-24': _t2t(512, 24, 8),
    '7': _t2t(256, 7, 4, performer=True, mlp_ratio=2),
    '10': _t2t(256, 10, 4, performer=True, mlp_ratio=2),
    '12': _t2t(256, 12, 4, performer=True, mlp_ratio=2),
    '14': _t2t(384, 14, 6, performer=True),
    '19': _t2t(448, 19, 7, performer=True),
    '24': _t2t(512, 24, 8, performer=True),
    '14-resnext': _t2t(384, 14, 32, performer=True),
    '14-wide': _t2t(768, 4, 12, performer=True),
}
