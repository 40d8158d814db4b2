"""Exits of a cascade, each of which is a complete classifier."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from timm.layers import DropPath, Mlp, resample_abs_pos_embed
from torch import Tensor, nn

from mmdtn.backbones.layers import add_branch, drop_path_rates, light_checkpoint
from mmdtn.backbones.t2t import sines
from mmdtn.norms import DTN, Place, build_norm

from .reuse import EMBEDDED, FeatureReuse, Grid, RelationReuse, Upstream
from .stems import PatchStem, t2t_stem


def _arch(family: str, width: int, depth: int, num_heads: int, mlp_ratio: float) -> dict[str, Any]:
    return dict(family=family, width=width, depth=depth, num_heads=num_heads, mlp_ratio=mlp_ratio)


ARCHS = {
    't2t-12': _arch('t2t', 256, 12, 4, 2),
    't2t-14': _arch('t2t', 384, 14, 6, 3),
    'deit-s': _arch('deit', 384, 12, 6, 4),
}


class Family(NamedTuple):
    """Settings that all architectures of a family share."""

    stem: Any
    eps: float
    qkv_bias: bool
    learned_positions: bool


FAMILIES = {'t2t': Family(t2t_stem, 1e-5, False, False), 'deit': Family(PatchStem, 1e-6, True, True)}


class Reuse(NamedTuple):
    """Tells which outputs of the previous exit an exit reuses."""

    features: bool = False
    relations: bool = False


class RelationAttention(nn.Module):
    """Self-attention that can add given logits to its own logits, and can return the sum."""

    def __init__(self, channels: int, num_heads: int, qkv_bias: bool) -> None:
        super().__init__()
        if channels % num_heads:
            raise ValueError(f'{num_heads} attention heads do not divide {channels} channels.')
        self.num_heads = num_heads
        self.qkv = nn.Linear(channels, 3 * channels, bias=qkv_bias)
        self.proj = nn.Linear(channels, channels)

    def forward(self, x: Tensor, added: Tensor | None, hand_on: bool) -> tuple[Tensor, Tensor | None]:
        """Returns the output and, with ``hand_on``, the attention logits.

        Args:
            x: Tokens ``B x T x C``.
            added: Logits to add, ``B x heads x T x T``, or None.
            hand_on: Whether to return the attention logits, ``B x heads x T x T``.
        """
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        logits = None
        if hand_on:
            logits = q * q.shape[-1] ** -0.5 @ k.mT
            logits = logits if added is None else logits + added
            out = logits.softmax(-1).to(v.dtype) @ v
        else:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=added)
        return self.proj(out.transpose(1, 2).flatten(2)), logits


class ExitBlock(nn.Module):
    """Pre-norm transformer block. With feature reuse, its second norm and MLP have ``EMBEDDED`` more channels."""

    def __init__(
        self, arch: dict[str, Any], norm_cfg: dict[str, Any], place: Place, drop_path: float, reuse_features: bool
    ) -> None:
        super().__init__()
        width = arch['width']
        taken = width + EMBEDDED * reuse_features
        self.norm1 = build_norm(norm_cfg, width, place)
        self.attn = RelationAttention(width, arch['num_heads'], FAMILIES[arch['family']].qkv_bias)
        self.features = FeatureReuse(width, place.eps) if reuse_features else None
        self.norm2 = build_norm(norm_cfg, taken, place)
        self.mlp = Mlp(taken, int(width * arch['mlp_ratio']), width)
        self.drop_path = DropPath(drop_path) if drop_path > 0 else nn.Identity()

    def forward(
        self, x: Tensor, grid: Grid, upstream: Upstream | None, added: Tensor | None, hand_on: bool
    ) -> tuple[Tensor, Tensor | None]:
        out, logits = self.attn(_normalise(self.norm1, x, grid), added, hand_on)
        x = add_branch(x, out, self.drop_path)
        joined = x
        if self.features is not None:
            assert upstream is not None  # only the first exit has none, and it does not reuse features
            joined = torch.cat((x, self.features(upstream, grid)), -1)
        return add_branch(x, self.mlp(_normalise(self.norm2, joined, grid)), self.drop_path), logits


def _normalise(norm: nn.Module, x: Tensor, grid: Grid) -> Tensor:
    """Normalises tokens for a linear layer. The first token is the class token, which has no position on the grid."""
    return norm(x, grid, num_prefix_tokens=1, feeds_autocast=True) if isinstance(norm, DTN) else norm(x)


class Exit(nn.Module):
    """A cascade's classifier, which returns logits and the output that the next exit reuses.

    Args:
        arch: Dict with the fields of ``ARCHS``.
        num_classes: Number of classes.
        grid: Number of tokens along a side of an image of ``img_size``.
        img_size: Image side for which position embeddings are made. Other sizes get interpolated or recomputed
        embeddings. norm_cfgs: Normaliser of each block. All other norms are LayerNorm. drop_path_rate: Stochastic depth
        rate of the last block. reuse: Which outputs of the previous exit are reused.
    """

    def __init__(
        self,
        arch: dict[str, Any],
        num_classes: int,
        grid: int,
        img_size: int,
        norm_cfgs: Sequence[dict[str, Any]],
        drop_path_rate: float,
        reuse: Reuse,
    ) -> None:
        super().__init__()
        family, width = FAMILIES[arch['family']], arch['width']
        self.grid = (grid, grid)
        self.stem = family.stem(width, grid, img_size)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embed: Tensor
        if family.learned_positions:
            self.pos_embed = nn.Parameter(torch.zeros(1, grid * grid + 1, width))
        else:
            self.register_buffer('pos_embed', sines(grid * grid + 1, width)[None], persistent=False)
        self.relations = RelationReuse(arch['depth'], arch['num_heads']) if reuse.relations else None
        place = Place(arch['num_heads'], eps=family.eps)
        self.blocks = nn.ModuleList(
            ExitBlock(arch, norm_cfg, place, rate, reuse.features)
            for norm_cfg, rate in zip(norm_cfgs, drop_path_rates(drop_path_rate, arch['depth']), strict=True)
        )
        self.norm = nn.LayerNorm(width, eps=family.eps)
        self.head = nn.Linear(width, num_classes)

    def forward(
        self, images: Tensor, upstream: Upstream | None = None, hand_on_relations: bool = False
    ) -> tuple[Tensor, Upstream]:
        x = self.stem(images)
        grid = (x.shape[1], x.shape[2])
        x = torch.cat((self.cls_token.expand(x.shape[0], -1, -1).to(x.dtype), x.flatten(1, 2)), 1)
        x = x + self._positions(grid)
        added = self._added_logits(upstream, grid)
        logits: list[Tensor] = []
        for i, block in enumerate(self.blocks):
            x, own = block(x, grid, upstream, added(i), hand_on_relations)
            if own is not None:
                logits.append(own)
        return self.head(self.norm(x[:, 0])), Upstream(x, grid, torch.cat(logits, 1) if logits else None)

    def _added_logits(self, upstream: Upstream | None, grid: Grid) -> Callable[[int], Tensor | None]:
        """Returns a function that maps a block's index to the logits to add to its attention."""
        relations = self.relations
        if relations is None:
            return lambda layer: None
        assert upstream is not None and upstream.relations is not None  # requested from the previous exit
        hidden, source = relations.hidden(upstream.relations), upstream.grid
        return lambda layer: light_checkpoint(lambda h: relations.added(h, layer, source, grid), hidden)

    def _positions(self, grid: Grid) -> Tensor:
        if grid == self.grid:
            return self.pos_embed
        if isinstance(self.pos_embed, nn.Parameter):
            return resample_abs_pos_embed(self.pos_embed, list(grid), list(self.grid))
        return sines(grid[0] * grid[1] + 1, self.pos_embed.shape[-1]).to(self.pos_embed)
