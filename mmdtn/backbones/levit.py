"""LeViT with DTN in front of every attention and MLP."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from mmengine.registry import MODELS
from timm.models import levit
from torch import Tensor, nn

from mmdtn.norms import Place, build_norm

from . import layers
from .base import Backbone, architecture
from .folding import fold_into, without_batch_norm
from .layers import run_block

STAGES = 3
PATCH_SIZE = 16
MLP_RATIO = 2


@MODELS.register_module()
class LeViTDTN(Backbone):
    """LeViT (arXiv 2104.01136) on maps ``B x H x W x C``, with DTN in front of every attention and MLP.

    The published LeViT has a batch norm after every layer, which ``timm.utils.reparameterize_model`` fuses into the
    layer. LeViT has no norms where other transformers have LayerNorm. ``norm_cfg`` adds norms in these places and keeps
    the batch norms. The attention learns a bias for each distance between tokens, so images must have the same size.

    Args:
        arch: ``'128s' | '128' | '192' | '256' | '384'``, or a dict of the fields of ``ARCHS``. A dict with a name under
            ``'base'`` needs only the fields that differ from that architecture. ``norm_heads`` is DTN's number of heads
            in each stage. It defaults to the number of attention heads, or to the next smaller number that divides the
            width.
        norm_cfg: Normaliser in front of every attention and MLP, such as ``dict(type='DTN')`` or any registered
            normaliser for ``B x H x W x C``. None is the published LeViT.
        pool_sizes: DTN's pool size in each stage.
        out_indices: Stages whose maps are returned for ``'featmap'``.
        out_type: ``'avg_featmap'`` returns a tuple with the mean over the last map, ``B x C``, for classification.
            ``'featmap'`` returns a tuple of maps ``B x C x H x W`` at 1/16, 1/32 and 1/64 of the image size.
        img_size: Side of the images, or ``(height, width)``.
        in_channels: Channels of the image.
        drop_path_rate: Stochastic depth rate of all blocks. None uses the architecture's default.
        frozen_stages: -1 freezes nothing, 0 freezes the stem, and n > 0 also freezes the first n stages.
        norm_eval: Keep batch norms in evaluation mode.
        with_cp: Recompute each block in the backward pass to save memory.
        fused: Norms that were fused into neighbouring layers. tools/model_converters/fuse.py sets this option.
        init_cfg: ``dict(type='Pretrained', checkpoint=..., prefix='backbone.')`` loads a checkpoint of MMPretrain.

    Example:
        >>> (features,) = LeViTDTN('128s')(torch.randn(1, 3, 224, 224))
        >>> maps = LeViTDTN('128s', out_type='featmap', img_size=(64, 96))(torch.randn(1, 3, 64, 96))
        >>> features.shape, [tuple(m.shape) for m in maps]
        (torch.Size([1, 384]), [(1, 128, 4, 6), (1, 256, 2, 3), (1, 384, 1, 2)])
    """

    def __init__(
        self,
        arch: str | dict = '128s',
        norm_cfg: dict | None = dict(type='DTN'),  # noqa: B006  # MM's convention; never written to
        pool_sizes: Sequence[int] = (2, 1, 1),
        out_indices: Sequence[int] = (0, 1, 2),
        out_type: str = 'avg_featmap',
        img_size: int | Sequence[int] = 224,
        in_channels: int = 3,
        drop_path_rate: float | None = None,
        frozen_stages: int = -1,
        norm_eval: bool = False,
        with_cp: bool = False,
        fused: Sequence[str] = (),
        init_cfg: dict | None = None,
    ) -> None:
        super().__init__(frozen_stages, norm_eval, init_cfg)
        a = _arch(arch)
        if out_type not in ('avg_featmap', 'featmap'):
            raise ValueError(
                f"out_type={out_type!r} does not exist. Choose 'avg_featmap' (classification) or 'featmap'."
            )
        if not set(out_indices) <= set(range(STAGES)):
            raise ValueError(f'out_indices={out_indices} has invalid stages. Stages are 0 to {STAGES - 1}.')
        if len(pool_sizes) != STAGES:
            raise ValueError(f'pool_sizes={pool_sizes} should have one value for each of the {STAGES} stages.')
        self.out_indices = tuple(out_indices)
        self.out_type = out_type
        self.img_size = (img_size, img_size) if isinstance(img_size, int) else tuple(img_size)
        self.num_features = a['widths'][-1]
        drop_path = a['drop_path_rate'] if drop_path_rate is None else drop_path_rate

        self.patch_embed = levit.Stem16(in_channels, a['widths'][0], act_layer=nn.Hardswish)
        grid = self.grid = _grid(self.img_size)
        places = [Place(*heads_and_pool) for heads_and_pool in zip(a['norm_heads'], pool_sizes, strict=True)]
        self.stages = nn.ModuleList()
        for i, (width, place) in enumerate(zip(a['widths'], places, strict=True)):
            blocks: list[nn.Module] = []
            if i > 0:
                before = a['widths'][i - 1]
                shrinking = ShrinkingAttention(before, width, a['key_width'], grid)
                blocks.append(ShrinkingBlock(before, width, shrinking, drop_path, norm_cfg, places[i - 1], place))
                grid = shrinking.shrunk
            for _ in range(a['depths'][i]):
                attention = LeViTAttention(width, a['key_width'], a['num_heads'][i], grid)
                blocks.append(layers.Block(width, attention, Mlp(width), drop_path, norm_cfg, place))
            self.stages.append(Stage(blocks, with_cp))
        if with_cp:
            self.check_checkpointing()
        if fused:  # otherwise make_room would treat the nn.Identity of norm_cfg=None as a fused norm
            self.make_room(fused)

    def init_weights(self) -> None:
        """Loads the checkpoint of ``init_cfg``. Without ``init_cfg``, all layers keep their initial values."""
        if self.init_cfg is not None:
            super().init_weights()

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        if _grid(x.shape[2:]) != self.grid:
            height, width = self.img_size
            raise ValueError(
                f'This LeViTDTN takes images of {height} x {width} only, because of the position bias of its '
                f'attention, but got {x.shape[2]} x {x.shape[3]}. Resize the images, or build the model with '
                f'img_size=({x.shape[2]}, {x.shape[3]}).'
            )
        x = self.patch_embed(x).permute(0, 2, 3, 1).contiguous()
        maps = []
        for stage in self.stages:
            x = stage(x)
            maps.append(x)
        if self.out_type == 'avg_featmap':
            return (x.mean((1, 2)),)
        return tuple(maps[i].permute(0, 3, 1, 2).contiguous() for i in self.out_indices)

    def frozen_parts(self) -> Iterator[nn.Module]:
        yield self.patch_embed
        yield from self.stages[: self.frozen_stages]


class Stage(nn.Module):
    """A stage of blocks. In the second and third stages, the first block halves the sides of the map."""

    def __init__(self, blocks: list[nn.Module], with_cp: bool) -> None:
        super().__init__()
        self.with_cp = with_cp
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = run_block(block, x, again=self.with_cp)
        return x


class ShrinkingBlock(layers.Block):
    """Block that halves the sides of the map and changes its width. The attention has no residual connection."""

    def __init__(
        self,
        in_channels: int,
        channels: int,
        attn: nn.Module,
        drop_path: float,
        norm_cfg: dict[str, Any] | None,
        place_before: Place,
        place: Place,
    ) -> None:
        super().__init__(channels, attn, Mlp(channels), drop_path, norm_cfg, place)
        self.norm1 = build_norm(norm_cfg, in_channels, place_before)

    def forward(self, x: Tensor, grid: tuple[int, int] | None = None) -> Tensor:
        """Computes the block. LeViT has no class token, so ``grid`` has no effect."""
        x = self.attn(layers.normalise(self.norm1, x, None))
        return layers.add_branch(x, self.mlp(layers.normalise(self.norm2, x, None)), self.drop_path)


class _LiveBiases:
    """Mixin that looks up the attention biases in every call.

    In evaluation mode, timm caches the biases. Cached biases become wrong if weights change, and may refer to a freed
    graph or to fake tensors.
    """

    attention_biases: nn.Parameter
    attention_bias_idxs: Tensor

    def get_attention_biases(self, device: torch.device) -> Tensor:
        return self.attention_biases[:, self.attention_bias_idxs]


class LeViTAttention(_LiveBiases, levit.Attention):
    """LeViT's attention from timm, applied to a map."""

    qkv: Any  # a layer with or without a batch norm

    def __init__(self, channels: int, key_width: int, num_heads: int, grid: tuple[int, int]) -> None:
        super().__init__(channels, key_width, num_heads, attn_ratio=2, resolution=grid, act_layer=nn.Hardswish)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(1, 2)).view(x.shape)

    def take_in(self, a: Tensor, b: Tensor) -> None:
        """Fuses the norm in front of the attention."""
        self.qkv = without_batch_norm(self.qkv)
        fold_into(self.qkv, a, b)


class ShrinkingAttention(_LiveBiases, levit.AttentionDownsample):
    """LeViT's downsampling attention from timm, applied to a map.

    The queries are the tokens in every second row and column.
    """

    kv: Any
    q: Any

    def __init__(self, in_channels: int, channels: int, key_width: int, grid: tuple[int, int]) -> None:
        num_heads = in_channels // key_width
        super().__init__(
            in_channels, channels, key_width, num_heads, attn_ratio=4, resolution=grid, act_layer=nn.Hardswish
        )
        self.shrunk = (-(-grid[0] // self.stride), -(-grid[1] // self.stride))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(1, 2)).unflatten(1, self.shrunk)

    def take_in(self, a: Tensor, b: Tensor) -> None:
        """Fuses the norm in front of the attention."""
        self.kv, self.q.ln = without_batch_norm(self.kv), without_batch_norm(self.q.ln)
        fold_into(self.kv, a, b)
        fold_into(self.q.ln, a, b)


class Mlp(levit.LevitMlp):
    """LeViT's MLP from timm, applied to a map."""

    ln1: Any

    def __init__(self, channels: int) -> None:
        super().__init__(channels, MLP_RATIO * channels, act_layer=nn.Hardswish)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(1, 2)).view(x.shape)

    def take_in(self, a: Tensor, b: Tensor) -> None:
        """Fuses the norm in front of the MLP."""
        self.ln1 = without_batch_norm(self.ln1)
        fold_into(self.ln1, a, b)


def _grid(size: Sequence[int]) -> tuple[int, int]:
    height, width = (-(-side // PATCH_SIZE) for side in size)
    return height, width


def _arch(arch: str | dict) -> dict[str, Any]:
    """Returns the fields of an architecture. DTN has the attention's number of heads if it divides the width."""
    said = architecture(arch, ARCHS, optional=('norm_heads',))
    norm_heads = [
        next(n for n in range(heads, 0, -1) if width % n == 0)
        for heads, width in zip(said['num_heads'], said['widths'], strict=True)
    ]
    return dict(norm_heads=norm_heads) | said


ARCHS: dict[str, dict[str, Any]] = {
    '128s': dict(widths=(128, 256, 384), key_width=16, num_heads=(4, 6, 8), depths=(2, 3, 4), drop_path_rate=0.0),
    '128': dict(widths=(128, 256, 384), key_width=16, num_heads=(4, 8, 12), depths=(4, 4, 4), drop_path_rate=0.0),
    '192': dict(widths=(192, 288, 384), key_width=32, num_heads=(3, 5, 6), depths=(4, 4, 4), drop_path_rate=0.0),
    '256': dict(widths=(256, 384, 512), key_width=32, num_heads=(4, 6, 8), depths=(4, 4, 4), drop_path_rate=0.0),
    '384': dict(widths=(384, 512, 768), key_width=32, num_heads=(6, 9, 12), depths=(4, 4, 4), drop_path_rate=0.1),
}
