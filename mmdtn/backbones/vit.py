"""Vision Transformers of one resolution, with DTN or any other normaliser in their blocks."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from mmengine.registry import MODELS
from timm.layers import resample_abs_pos_embed_nhwc
from torch import Tensor, nn

from mmdtn.norms import Place, build_norm, needs_grid

from .base import Backbone, architecture, check_other_norms
from .layers import Attention, Block, ConvMlp, drop_path_rates, pad_to_multiple, run_block


@dataclass(frozen=True)
class ViTOptions:
    """Arguments that backbones of one resolution share.

    Args:
        norm_cfg: Normaliser of the first ``dtn_layers`` blocks: ``dict(type='DTN')``; ``dict(type='LN')`` is the
            published model, or any registered one that works on ``B x H x W x C``.
        dtn_layers: How many blocks take ``norm_cfg``; None: 10, or all if there are fewer. Where a class token joins
            behind them, at least two blocks are left for it, as in the published models.
        other_norm_cfg: Normaliser of all other blocks and layers, and of the one behind the last block; not DTN.
        cls_from: Block, from 0, before which the class token joins. None: for ``'cls_token'`` after the blocks with
            DTN or ``rpe``, or before the first with another normaliser; for the other outputs never.
        out_indices: Blocks, from 0 or backwards from -1, whose maps ``'featmap'`` or class tokens ``'cls_token'``
            returns. Later blocks are not built.
        out_type: ``'cls_token'``, a tuple of ``B x C``, each behind the last norm; ``'avg_featmap'``, a tuple of one
            ``B x C``, the mean over the grid; ``'cls+mean'``, a tuple of one ``B x 2C``, the class token and the mean
            of the patches; or ``'featmap'``, a tuple of ``B x C x H x W``. The last block is followed by a norm.
        drop_path_rate: Stochastic depth of the last block.
        frozen_stages: -1 nothing, 0 the patch and position embedding, n also the first n blocks; all of the backbone
            if n is the number of blocks.
        norm_eval: Keep batch norms, should ``norm_cfg`` bring any, in evaluation mode.
        with_cp: Compute each block again in the backward pass, to save memory.
        fused: Norms that were fused into their neighbours: tools/model_converters/fuse.py writes this.
        init_cfg: ``dict(type='Pretrained', checkpoint=..., prefix='backbone.')`` loads what MMPretrain saved.
    """

    norm_cfg: dict = field(default_factory=lambda: dict(type='DTN'))
    dtn_layers: int | None = None
    other_norm_cfg: dict = field(default_factory=lambda: dict(type='LN'))
    cls_from: int | None = None
    out_indices: Sequence[int] = (-1,)
    out_type: str = 'cls_token'
    drop_path_rate: float = 0.1
    frozen_stages: int = -1
    norm_eval: bool = False
    with_cp: bool = False
    fused: Sequence[str] = ()
    init_cfg: dict | None = None


class PlainBackbone(Backbone):
    """Blocks of one width on one grid, the first ones normalised by ``norm_cfg``.

    A subclass makes tokens of an image. ``pos_embed``, ``1 x h x w x C``, is learned if it is a parameter.
    """

    def __init__(
        self,
        arch: dict[str, Any],
        patch_embed: nn.Module,
        pos_embed: Tensor,
        options: ViTOptions,
        eps: float,
        qkv_bias: bool,
        rpe: bool | str = False,
    ) -> None:
        super().__init__(options.frozen_stages, options.norm_eval, options.init_cfg)
        norm_cfg, other_norm_cfg = options.norm_cfg, options.other_norm_cfg
        out_indices, out_type, cls_from = options.out_indices, options.out_type, options.cls_from
        width, depth, num_heads = arch['width'], arch['depth'], arch['num_heads']
        has_cls_token = out_type in ('cls_token', 'cls+mean')
        joins_late = has_cls_token and cls_from is None and bool(rpe or needs_grid(norm_cfg))
        dtn_layers = options.dtn_layers
        if dtn_layers is None:
            dtn_layers = min(10, max(depth - 2, 1)) if joins_late else min(10, depth)
        if out_type not in ('cls_token', 'avg_featmap', 'cls+mean', 'featmap'):
            raise ValueError(f"out_type={out_type!r}: choose 'cls_token', 'avg_featmap', 'cls+mean' or 'featmap'.")
        if not all(-depth <= i < depth for i in out_indices) or not 0 <= dtn_layers <= depth:
            raise ValueError(f'out_indices={out_indices} or dtn_layers={dtn_layers} is not within {depth} blocks.')
        if cls_from is None and has_cls_token:
            cls_from = dtn_layers if joins_late else 0
        if cls_from is not None and not 0 <= cls_from < depth:
            raise ValueError(
                f'The class token cannot join before block {cls_from} of 0 to {depth - 1}: it would see no patch. '
                f'Choose cls_from=0, with which it is there from the first block on, or another number below {depth}; '
                f'or out_type={"avg_featmap"!r}.'
            )
        if cls_from is not None and cls_from < dtn_layers and rpe:
            raise ValueError(
                f'The class token joins before block {cls_from}, but has no place on the grid that rpe needs in the '
                f'first dtn_layers={dtn_layers} blocks: cls_from should be {dtn_layers} or more.'
            )
        self.out_type = out_type
        self.cls_from = cls_from
        self.with_cp = options.with_cp
        self.num_features = width
        several = out_type in ('cls_token', 'featmap')
        self.out_indices = tuple(i % depth for i in out_indices) if several else (depth - 1,)
        if out_type == 'cls_token' and cls_from is not None and min(self.out_indices) < cls_from:
            raise ValueError(
                f'out_indices={out_indices}: the class token joins before block {cls_from}, so that block '
                f'{min(self.out_indices)} has none. Choose blocks from {cls_from} to {depth - 1}, or cls_from=0.'
            )

        self.patch_embed = patch_embed
        self.pos_embed: Tensor
        if isinstance(pos_embed, nn.Parameter):
            self.pos_embed = pos_embed
        else:
            self.register_buffer('pos_embed', pos_embed, persistent=False)
        if cls_from is not None:
            self.cls_token = nn.Parameter(torch.zeros(1, 1, 1, width))
        norms = [norm_cfg] * dtn_layers + [check_other_norms(other_norm_cfg)] * (depth - dtn_layers)
        place = Place(num_heads, eps=eps)
        self.blocks = nn.ModuleList(
            Block(
                width,
                Attention(width, num_heads, qkv_bias=qkv_bias, rpe=rpe if i < dtn_layers else False),
                ConvMlp(width, int(width * arch['mlp_ratio'])),
                rate,
                cfg,
                place,
            )
            for i, (rate, cfg) in enumerate(zip(drop_path_rates(options.drop_path_rate, depth), norms, strict=True))
        )[: max(self.out_indices) + 1]
        if out_type == 'cls_token' or depth - 1 in self.out_indices:
            self.norm = build_norm(other_norm_cfg, width, place)
        one = len(self.out_indices) == 1 and out_type in ('cls_token', 'avg_featmap')
        self.last_norm = 'norm' if one else None
        self.depth = depth
        if self.with_cp:
            self.check_checkpointing()
        self.make_room(options.fused)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x = self.tokens(x)
        shape, grid = x.shape, None
        outs = {}
        for i, block in enumerate(self.blocks):
            if i == self.cls_from:
                # As one row: all but DTN need no more, and DTN is told the grid of the tokens behind the first.
                grid = shape[1:3]
                cls = self.cls_token.expand(x.shape[0], -1, -1, -1).to(x.dtype)
                x = torch.cat((cls, x.flatten(1, 2)[:, None]), 2)
            x = run_block(block, x, grid, again=self.with_cp)
            if i in self.out_indices:
                outs[i] = x
        if self.out_type == 'cls_token':
            return tuple(self.norm(outs[i])[:, 0, 0].contiguous() for i in self.out_indices)
        if self.out_type == 'cls+mean':
            tokens = self.norm(x)[:, 0]
            return (torch.cat((tokens[:, 0], tokens[:, 1:].mean(1)), 1),)
        outs = {i: t if t.shape == shape else t[:, 0, 1:].reshape(shape) for i, t in outs.items()}
        if self.depth - 1 in outs:
            outs[self.depth - 1] = self.norm(outs[self.depth - 1])
        if self.out_type == 'avg_featmap':
            return (outs[self.depth - 1].mean((1, 2)),)
        return tuple(outs[i].permute(0, 3, 1, 2).contiguous() for i in self.out_indices)

    def tokens(self, images: Tensor) -> Tensor:
        """``B x C' x H x W`` to ``B x h x w x C``, with their positions."""
        raise NotImplementedError

    def frozen_parts(self) -> Iterator[nn.Module | Tensor]:
        yield self.patch_embed
        yield self.pos_embed
        yield from self.blocks[: self.frozen_stages]
        if self.frozen_stages >= self.depth:
            yield from (getattr(self, name) for name in ('cls_token', 'norm') if hasattr(self, name))


@MODELS.register_module()
class ViTDTN(PlainBackbone):
    """ViT (arXiv 2010.11929, as in DeiT) on maps ``B x H x W x C``, its first blocks normalised by DTN.

    A class token has no place on the grid, so in the paper it joins after the blocks with DTN. With ``cls_from=0`` it
    is there from the first block on, as in the published ViT, and DTN leaves it out of its neighbourhoods.

    Args:
        arch: ``'t' | 't*' | 's' | 's*' | 'b' | 'b*'``, or a dict of the fields of ``ARCHS``; with a name under
            ``'base'``, only of those that differ from it.
        img_size: Side of the images for which the position embedding is held; it is resized for others.
        patch_size: Side of a patch.
        in_channels: Channels of the image.
        norm_cfg: See :class:`ViTOptions`. Unless ``other_norm_cfg`` gives ``eps``, its norms take that of ``norm_cfg``:
            by default 1e-5 with DTN, as published, and 1e-6 without, as in timm.
        rpe: True adds relative position to the attention of the first ``dtn_layers`` blocks, as DTN's P has it (Eq. 6):
            three numbers for each head. ``'local'`` starts them as Eq. 7 says.
        options: Fields of :class:`ViTOptions`.

    Example:
        >>> (features,) = ViTDTN('t*')(torch.randn(1, 3, 64, 96))
        >>> (maps,) = ViTDTN('t*', out_type='featmap')(torch.randn(1, 3, 64, 96))
        >>> features.shape, maps.shape
        (torch.Size([1, 192]), torch.Size([1, 192, 4, 6]))
    """

    def __init__(
        self,
        arch: str | dict = 's*',
        img_size: int = 224,
        patch_size: int = 16,
        in_channels: int = 3,
        rpe: bool | str = False,
        **options: Any,
    ) -> None:
        a = architecture(arch, ARCHS)
        side = -(-img_size // patch_size)
        patch_embed = nn.Conv2d(in_channels, a['width'], patch_size, patch_size)
        pos_embed = nn.Parameter(torch.zeros(1, side, side, a['width']))
        shared = ViTOptions(**options)
        # One eps for all norms. The published DTN models have torch's default, timm's ViT and DeiT have 1e-6.
        eps = shared.norm_cfg.get('eps', 1e-5 if needs_grid(shared.norm_cfg) else 1e-6)
        super().__init__(a, patch_embed, pos_embed, shared, eps=eps, qkv_bias=True, rpe=rpe)
        self.patch_size = patch_size

    def tokens(self, images: Tensor) -> Tensor:
        x = self.patch_embed(pad_to_multiple(images, self.patch_size, self.patch_size)).permute(0, 2, 3, 1)
        return x.contiguous() + resample_abs_pos_embed_nhwc(self.pos_embed, list(x.shape[1:3]))


def _vit(width: int, num_heads: int) -> dict[str, Any]:
    return dict(width=width, depth=12, num_heads=num_heads, mlp_ratio=4)


# With a star: heads as the published DTN models have them.
ARCHS = {
    't': _vit(192, 3),
    't*': _vit(192, 4),
    's': _vit(384, 6),
    's*': _vit(432, 9),
    'b': _vit(768, 12),
    'b*': _vit(768, 16),
}
