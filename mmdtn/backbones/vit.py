"""Vision Transformers with a single resolution, and with DTN or any other normaliser in their blocks."""

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
    """Arguments that both ViT and T2T-ViT accept.

    Args:
        norm_cfg: Normaliser of the first ``dtn_layers`` blocks, such as ``dict(type='DTN')`` or any registered
            normaliser for ``B x H x W x C``. ``dict(type='LN')`` is the published model.
        dtn_layers: Number of blocks that use ``norm_cfg``. The default is 10, or all blocks if there are fewer. If the
        class token joins after these blocks, at least two blocks remain for it by default. other_norm_cfg: Normaliser
        of the other blocks, the token module of T2T-ViT, and the norm after the last block.
            DTN is not supported here.
        cls_from: Block, from 0, before which the class token joins. By default, the class token joins after the
            first ``dtn_layers`` blocks if they have DTN or ``rpe``, and otherwise before the first block. By default,
            there is no class token if the output does not contain it.
        out_indices: Blocks whose maps (``'featmap'``) or class tokens (``'cls_token'``) are returned. Negative numbers
            count from the last block. Blocks after the last of these are not built.
        out_type: Type of the output, which is a tuple. ``'cls_token'`` returns normalised class tokens, ``B x C`` each.
            ``'avg_featmap'`` returns the mean over the grid, ``B x C``. ``'cls+mean'`` returns the class token
            concatenated with the mean of the patch tokens, ``B x 2C``. ``'featmap'`` returns maps ``B x C x H x W``,
            but only the last block's map is normalised.
        drop_path_rate: Stochastic depth rate of the last block.
        frozen_stages: -1 freezes nothing, 0 freezes the patch and position embedding, and n > 0 also freezes the first
            n blocks. If n is the number of blocks, the whole backbone is frozen.
        norm_eval: Keep batch norms in evaluation mode, if ``norm_cfg`` has any.
        with_cp: Recompute each block in the backward pass to save memory.
        fused: Norms that were fused into neighbouring layers. tools/model_converters/fuse.py sets this option.
        init_cfg: ``dict(type='Pretrained', checkpoint=..., prefix='backbone.')`` loads a checkpoint of MMPretrain.
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
    """Base class of backbones in which all blocks have the same width and grid.

    Subclasses convert images to tokens. ``pos_embed``, ``1 x h x w x C``, is learned if it is a parameter.
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
            raise ValueError(
                f"out_type={out_type!r} does not exist. Choose 'cls_token', 'avg_featmap', 'cls+mean' or 'featmap'."
            )
        if not all(-depth <= i < depth for i in out_indices) or not 0 <= dtn_layers <= depth:
            raise ValueError(f'out_indices={out_indices} or dtn_layers={dtn_layers} is not valid for {depth} blocks.')
        if cls_from is None and has_cls_token:
            cls_from = dtn_layers if joins_late else 0
        if cls_from is not None and not 0 <= cls_from < depth:
            raise ValueError(
                f'The class token cannot join before block {cls_from}, because the blocks are 0 to {depth - 1}. Set '
                f'cls_from=0 to add it before the first block, set another cls_from below {depth}, or set '
                f'out_type={"avg_featmap"!r}.'
            )
        if cls_from is not None and cls_from < dtn_layers and rpe:
            raise ValueError(
                f'The class token joins before block {cls_from}, but has no position on the grid, which rpe needs in '
                f'the first dtn_layers={dtn_layers} blocks. Set cls_from to {dtn_layers} or more.'
            )
        self.out_type = out_type
        self.cls_from = cls_from
        self.with_cp = options.with_cp
        self.num_features = width
        several = out_type in ('cls_token', 'featmap')
        self.out_indices = tuple(i % depth for i in out_indices) if several else (depth - 1,)
        if out_type == 'cls_token' and cls_from is not None and min(self.out_indices) < cls_from:
            raise ValueError(
                f'out_indices={out_indices} is not valid: the class token joins before block {cls_from}, so block '
                f'{min(self.out_indices)} has none. Choose blocks from {cls_from} to {depth - 1}, or set cls_from=0.'
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
                # The class token and the flattened tokens form one row. DTN also needs the size of the grid.
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
        """Converts images ``B x C' x H x W`` to tokens ``B x h x w x C`` with position embeddings."""
        raise NotImplementedError

    def frozen_parts(self) -> Iterator[nn.Module | Tensor]:
        yield self.patch_embed
        yield self.pos_embed
        yield from self.blocks[: self.frozen_stages]
        if self.frozen_stages >= self.depth:
            yield from (getattr(self, name) for name in ('cls_token', 'norm') if hasattr(self, name))


@MODELS.register_module()
class ViTDTN(PlainBackbone):
    """ViT (arXiv 2010.11929, as in DeiT) with DTN in its first blocks, on maps ``B x H x W x C``.

    A class token has no position on the grid. In the DTN paper, the class token therefore joins after the blocks with
    DTN. With ``cls_from=0``, it joins before the first block, as in the published ViT. DTN's neighbourhoods always
    exclude it.

    Args:
        arch: ``'t' | 't*' | 's' | 's*' | 'b' | 'b*'``, or a dict of the fields of ``ARCHS``. A dict with a name under
            ``'base'`` needs only the fields that differ from that architecture.
        img_size: Side of the images that determines the size of the position embedding. The embedding is resized for
            images of other sizes.
        patch_size: Side of a patch.
        in_channels: Channels of the image.
        norm_cfg: See :class:`ViTOptions`. The default ``eps`` of all norms is the ``eps`` in ``norm_cfg``, otherwise
            1e-5 with DTN, as published, and 1e-6 with other normalisers, as in timm.
        rpe: True adds a relative position bias with the formula of DTN's P (Eq. 6) to the attention in the first
            ``dtn_layers`` blocks. It has three parameters per head. ``'local'`` initialises them by Eq. 7.
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
        # All norms have the same eps. Published DTN models use torch's default, but timm's ViT and DeiT use 1e-6.
        eps = shared.norm_cfg.get('eps', 1e-5 if needs_grid(shared.norm_cfg) else 1e-6)
        super().__init__(a, patch_embed, pos_embed, shared, eps=eps, qkv_bias=True, rpe=rpe)
        self.patch_size = patch_size

    def tokens(self, images: Tensor) -> Tensor:
        x = self.patch_embed(pad_to_multiple(images, self.patch_size, self.patch_size)).permute(0, 2, 3, 1)
        return x.contiguous() + resample_abs_pos_embed_nhwc(self.pos_embed, list(x.shape[1:3]))


def _vit(width: int, num_heads: int) -> dict[str, Any]:
    return dict(width=width, depth=12, num_heads=num_heads, mlp_ratio=4)


# Architectures with a star have as many heads as the published DTN models.
ARCHS = {
    't': _vit(192, 3),
    't*': _vit(192, 4),
    's': _vit(384, 6),
    's*': _vit(432, 9),
    'b': _vit(768, 12),
    'b*': _vit(768, 16),
}
