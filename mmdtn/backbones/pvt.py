"""Pyramid Vision Transformers, versions 1 and 2, with DTN or any other normaliser in their blocks."""

import itertools
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from mmengine.registry import MODELS
from torch import Tensor, nn

from mmdtn.norms import DTN, Place, build_norm, needs_grid, norm_class

from .base import Backbone, architecture, check_other_norms
from .folding import FusesNorms, Neighbour, fold_behind
from .layers import Attention, Block, ConvMlp, drop_path_rates, pad_to_multiple, run_block

STAGES = 4
POOL_SIZES = (4, 2, 1, 1)  # pool size of each stage; at 224 pixels, the first three stages pool to 14 x 14 cells


@MODELS.register_module()
class PVTDTN(Backbone):
    """PVT (arXiv 2102.12122) and PVTv2 (arXiv 2106.13797) with DTN, on maps ``B x H x W x C``.

    Args:
        arch: ``'tiny' | 'small' | 'medium' | 'large'`` (PVT), ``'b0'`` to ``'b5'`` (PVTv2), or a dict of the fields of
            ``ARCHS``. A dict with a name under ``'base'`` needs only the fields that differ from that architecture.
        norm_cfg: Normaliser of the blocks in ``dtn_stages``, such as ``dict(type='DTN')`` or any registered normaliser
            for ``B x H x W x C``. ``dict(type='LN')`` is the published PVT.
        dtn_stages: Stages, from 0, whose blocks use ``norm_cfg``.
        other_norm_cfg: Normaliser of all other norms: in the blocks of other stages, in patch embeddings and spatial
            reductions, after the stages of PVTv2, and at the end of the network. DTN is not supported here. The
            default ``eps`` is 1e-5 in patch embeddings and reductions and 1e-6 elsewhere, as published. MMDetection's
            PVT uses 1e-6 everywhere.
        out_indices: Stages whose maps are returned for ``'featmap'``.
        out_type: ``'featmap'`` returns a tuple of maps ``B x C x H x W``. ``'cls_token'`` returns a tuple with one
            ``B x C`` tensor for classification: the class token of PVT, or the mean over the last map of PVTv2.
        img_size: Side of the images that determines the size of the position embeddings. The embeddings are resized
            for images of other sizes.
        in_channels: Channels of the image.
        drop_path_rate: Stochastic depth rate of the last block. None uses the architecture's default.
        frozen_stages: -1 freezes nothing, 0 freezes the first patch embedding, and n > 0 also freezes the first n
            stages.
        norm_eval: Keep batch norms in evaluation mode, if ``norm_cfg`` has any.
        with_cp: Recompute each block in the backward pass to save memory.
        rpe: True adds a relative position bias with the formula of DTN's P (Eq. 6) to the attention in ``dtn_stages``.
            It has three parameters per head. ``'local'`` initialises them by Eq. 7.
        fused: Norms that were fused into neighbouring layers. tools/model_converters/fuse.py sets this option.
        init_cfg: ``dict(type='Pretrained', checkpoint=..., prefix='backbone.')`` loads a checkpoint of MMPretrain.

    Example:
        >>> maps = PVTDTN('tiny')(torch.randn(1, 3, 64, 96))
        >>> [tuple(m.shape) for m in maps]
        [(1, 64, 16, 24), (1, 128, 8, 12), (1, 320, 4, 6), (1, 512, 2, 3)]
    """

    def __init__(
        self,
        arch: str | dict = 'tiny',
        norm_cfg: dict = dict(type='DTN'),  # noqa: B006  # MM's convention; never written to
        dtn_stages: Sequence[int] = (0, 1, 2),
        other_norm_cfg: dict = dict(type='LN'),  # noqa: B006
        out_indices: Sequence[int] = (0, 1, 2, 3),
        out_type: str = 'featmap',
        img_size: int = 224,
        in_channels: int = 3,
        drop_path_rate: float | None = None,
        frozen_stages: int = -1,
        norm_eval: bool = False,
        with_cp: bool = False,
        rpe: bool | str = False,
        fused: Sequence[str] = (),
        init_cfg: dict | None = None,
    ) -> None:
        super().__init__(frozen_stages, norm_eval, init_cfg)
        a = _arch(arch, norm_cfg)
        if out_type not in ('featmap', 'cls_token'):
            raise ValueError(
                f"out_type={out_type!r} does not exist. Choose 'featmap' (detection) or 'cls_token' (classification)."
            )
        if not set(out_indices) <= set(range(STAGES)) or not set(dtn_stages) <= set(range(STAGES)):
            raise ValueError(
                f'out_indices={out_indices} or dtn_stages={dtn_stages} has invalid stages. Stages are 0 to 3.'
            )
        self.out_indices = tuple(out_indices)
        self.out_type = out_type
        self.version = a['version']
        self.num_features = a['widths'][-1]
        self.takes_class_token = out_type == 'cls_token' and self.version == 1
        if self.takes_class_token and (needs_grid(norm_cfg) or rpe) and STAGES - 1 in dtn_stages:
            raise ValueError(
                "With out_type='cls_token', the last stage of PVT has a class token and does not support DTN or rpe. "
                'Remove 3 from dtn_stages.'
            )

        drop_path_rate = a['drop_path_rate'] if drop_path_rate is None else drop_path_rate
        drop_paths = iter(drop_path_rates(drop_path_rate, sum(a['depths'])))
        check_other_norms(other_norm_cfg)
        second = self.version == 2
        side, channels = img_size, in_channels
        self.stages = nn.ModuleList()
        for i, width in enumerate(a['widths']):
            side = -(-side // (4 if i == 0 else 2))
            place = Place(a['norm_heads'][i], POOL_SIZES[i], eps=1e-6)
            near_conv = place._replace(eps=1e-5)  # as published; MMDetection's PVT uses 1e-6
            embed_norm = build_norm(other_norm_cfg, width, near_conv)
            patch_embed = PatchEmbed(channels, width, 4 if i == 0 else 2, second, embed_norm)
            heads, sr_ratio, own = a['num_heads'][i], a['sr_ratios'][i], i in dtn_stages
            blocks = [
                Block(
                    width,
                    Attention(
                        width, heads, sr_ratio, build_norm(other_norm_cfg, width, near_conv), rpe=rpe if own else False
                    ),
                    ConvMlp(width, int(width * a['mlp_ratios'][i]), conv=second),
                    drop_path,
                    norm_cfg if own else other_norm_cfg,
                    place,
                )
                for drop_path in itertools.islice(drop_paths, a['depths'][i])
            ]
            pos_embed = None if second else nn.Parameter(torch.zeros(1, side, side, width))
            norm = build_norm(other_norm_cfg, width, place) if second else nn.Identity()
            self.stages.append(Stage(patch_embed, pos_embed, blocks, norm, with_cp))
            channels = width
        if self.takes_class_token:
            self.cls_token = nn.Parameter(torch.zeros(1, 1, 1, self.num_features))
            self.cls_pos = nn.Parameter(torch.zeros(1, 1, 1, self.num_features))
            self.norm = build_norm(other_norm_cfg, self.num_features, Place(a['norm_heads'][-1], eps=1e-6))
        if out_type == 'cls_token':
            self.last_norm = 'norm' if self.takes_class_token else f'stages.{STAGES - 1}.norm'
        if with_cp:
            self.check_checkpointing()
        self.make_room(fused)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        maps = []
        stage: Any
        for i, stage in enumerate(self.stages):
            x = stage.embed(x if i == 0 else x.permute(0, 3, 1, 2))
            if self.takes_class_token and i == STAGES - 1:
                # The class token and the map form one row of tokens. Attention and LayerNorm do not need a grid.
                cls = (self.cls_token + self.cls_pos).expand(x.shape[0], -1, -1, -1)
                x = torch.cat((cls.to(x.dtype), x.flatten(1, 2)[:, None]), 2)
            x = stage.blocks_and_norm(x)
            maps.append(x)
        if self.out_type == 'featmap':
            return tuple(maps[i].permute(0, 3, 1, 2).contiguous() for i in self.out_indices)
        return (self.norm(x)[:, 0, 0] if self.takes_class_token else x.mean((1, 2)),)

    def frozen_parts(self) -> Iterator[nn.Module | nn.Parameter]:
        first: Any = self.stages[0]
        yield first.patch_embed
        if first.pos_embed is not None:
            yield first.pos_embed
        yield from self.stages[: self.frozen_stages]


class Stage(nn.Module):
    """A stage of PVT: a patch embedding and blocks.

    Version 1 adds a position embedding after the patch embedding. Version 2 has a norm after the blocks.
    """

    def __init__(
        self,
        patch_embed: nn.Module,
        pos_embed: nn.Parameter | None,
        blocks: Sequence[nn.Module],
        norm: nn.Module,
        with_cp: bool,
    ) -> None:
        super().__init__()
        self.with_cp = with_cp
        self.patch_embed = patch_embed
        self.pos_embed = pos_embed
        self.blocks = nn.ModuleList(blocks)
        self.norm = norm

    def embed(self, x: Tensor) -> Tensor:
        """Converts an image or a map ``B x C x H x W`` to tokens ``B x h x w x C``."""
        x = self.patch_embed(x)
        if self.pos_embed is None:
            return x
        position: Tensor = self.pos_embed
        if position.shape[1:3] != x.shape[1:3]:
            resized = F.interpolate(position.permute(0, 3, 1, 2), size=x.shape[1:3], mode='bilinear')
            position = resized.permute(0, 2, 3, 1)
        return x + position

    def blocks_and_norm(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = run_block(block, x, again=self.with_cp)
        return self.norm(x)


class PatchEmbed(FusesNorms):
    """Patch embedding with stride ``s``, from ``B x C x H x W`` to ``B x ceil(H / s) x ceil(W / s) x C'``.

    In version 2, the patches overlap.
    """

    def __init__(self, in_channels: int, channels: int, stride: int, overlap: bool, norm: nn.Module) -> None:
        super().__init__()
        self.stride, self.overlap = stride, overlap
        kernel = {4: 7, 2: 3}[stride] if overlap else stride
        self.proj = nn.Conv2d(in_channels, channels, kernel, stride, padding=kernel // 2 if overlap else 0)
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.overlap else pad_to_multiple(x, self.stride, self.stride)
        return self.norm(self.proj(x).permute(0, 2, 3, 1).contiguous())

    def neighbours(self) -> dict[str, Neighbour]:
        return dict(norm=Neighbour('proj', partial(fold_behind, self.proj)))


def _arch(arch: str | dict, norm_cfg: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of an architecture. The normaliser determines the default numbers of heads."""
    heads = DTN_HEADS if issubclass(norm_class(norm_cfg), DTN) else LN_HEADS
    archs = {name: fields | dict(num_heads=heads) for name, fields in ARCHS.items()}
    said = architecture(arch, archs, optional=('norm_heads',))
    return dict(norm_heads=said['num_heads']) | said


LN_HEADS = (1, 2, 5, 8)
DTN_HEADS = (4, 4, 5, 8)


def _pvt(version: int, depths: tuple[int, ...], drop_path_rate: float, **others: Any) -> dict[str, Any]:
    common = dict(widths=(64, 128, 320, 512), mlp_ratios=(8, 8, 4, 4), sr_ratios=(8, 4, 2, 1))
    return dict(version=version, depths=depths, drop_path_rate=drop_path_rate) | common | others


ARCHS = dict(
    tiny=_pvt(1, (2, 2, 2, 2), 0.1),
    small=_pvt(1, (3, 4, 6, 3), 0.1),
    medium=_pvt(1, (3, 4, 18, 3), 0.3),
    large=_pvt(1, (3, 8, 27, 3), 0.3),
    b0=_pvt(2, (2, 2, 2, 2), 0.1, widths=(32, 64, 160, 256)),
    b1=_pvt(2, (2, 2, 2, 2), 0.1),
    b2=_pvt(2, (3, 4, 6, 3), 0.1),
    b3=_pvt(2, (3, 4, 18, 3), 0.3),
    b4=_pvt(2, (3, 8, 27, 3), 0.3),
    b5=_pvt(2, (3, 6, 40, 3), 0.3, mlp_ratios=(4, 4, 4, 4)),
)
