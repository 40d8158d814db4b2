"""Swin Transformers with DTN or any other normaliser in their blocks."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from mmengine.registry import MODELS
from timm import layers
from timm.models import swin_transformer
from torch import Tensor, nn

from mmdtn.norms import Place, build_norm
from mmdtn.ops import is_exporting

from .base import Backbone, architecture, check_other_norms
from .folding import FusesNorms, Neighbour, border_in_front, fold_behind, fold_into, pad
from .layers import Block, ConvMlp, drop_path_rates, run_block

STAGES = 4
MLP_RATIO = 4


@MODELS.register_module()
class SwinDTN(Backbone):
    """Swin Transformer (arXiv 2103.14030) with DTN, on maps ``B x H x W x C``.

    Args:
        arch: ``'tiny' | 'small' | 'base'``, or a dict of the fields of ``ARCHS``. A dict with a name under ``'base'``
            needs only the fields that differ from that architecture. ``norm_heads`` is DTN's number of heads in each
            stage. It defaults to the number of attention heads.
        norm_cfg: Normaliser of the blocks, such as ``dict(type='DTN')`` or any registered normaliser for
            ``B x H x W x C``. ``dict(type='LN')`` is the published Swin.
        other_norm_cfg: Normaliser of the patch embedding, of patch merging and of the outputs. DTN is not supported
            here.
        pool_sizes: DTN's pool size in each stage.
        out_indices: Stages whose maps are returned for ``'featmap'``. Each map has its own norm. out_type:
        ``'featmap'`` returns a tuple of maps ``B x C x H x W``. ``'avg_featmap'`` returns a tuple with the
            mean over the last map, ``B x C``, for classification. As in the published models, windows of maps that are
            not larger than a window are shifted only for ``'featmap'``.
        window_size: Side of the windows. The attention pads maps whose sides are not multiples of it.
        drop_path_rate: Stochastic depth rate of the last block. None uses the architecture's default.
        frozen_stages: -1 freezes nothing, 0 freezes the patch embedding, and n > 0 also freezes the first n stages and
            the norms of their outputs.
        norm_eval: Keep batch norms in evaluation mode, if ``norm_cfg`` has any.
        with_cp: Recompute each block in the backward pass to save memory.
        fused: Norms that were fused into neighbouring layers. tools/model_converters/fuse.py sets this option.
        init_cfg: ``dict(type='Pretrained', checkpoint=..., prefix='backbone.')`` loads a checkpoint of MMPretrain.

    Example:
        >>> maps = SwinDTN('tiny')(torch.randn(1, 3, 64, 96))
        >>> [tuple(m.shape) for m in maps]
        [(1, 96, 16, 24), (1, 192, 8, 12), (1, 384, 4, 6), (1, 768, 2, 3)]
    """

    def __init__(
        self,
        arch: str | dict = 'tiny',
        norm_cfg: dict = dict(type='DTN'),  # noqa: B006  # MM's convention; never written to
        other_norm_cfg: dict = dict(type='LN'),  # noqa: B006
        pool_sizes: Sequence[int] = (4, 2, 1, 1),  # 14 x 14 cells at 224 pixels; 7 x 7 in the last stage
        out_indices: Sequence[int] = (0, 1, 2, 3),
        out_type: str = 'featmap',
        window_size: int = 7,
        drop_path_rate: float | None = None,
        frozen_stages: int = -1,
        norm_eval: bool = False,
        with_cp: bool = False,
        fused: Sequence[str] = (),
        init_cfg: dict | None = None,
    ) -> None:
        super().__init__(frozen_stages, norm_eval, init_cfg)
        a = _arch(arch)
        if out_type not in ('featmap', 'avg_featmap'):
            raise ValueError(
                f"out_type={out_type!r} does not exist. Choose 'featmap' (detection) or 'avg_featmap' (classification)."
            )
        if not set(out_indices) <= set(range(STAGES)):
            raise ValueError(f'out_indices={out_indices} has invalid stages. Stages are 0 to 3.')
        if len(pool_sizes) != STAGES:
            raise ValueError(f'pool_sizes={pool_sizes} should have one value for each of the {STAGES} stages.')
        if not isinstance(window_size, int) or window_size < 1:
            raise ValueError(
                f'window_size={window_size!r} is not valid. Give the side of a window in tokens, such as 7.'
            )
        self.out_indices = tuple(out_indices) if out_type == 'featmap' else (STAGES - 1,)
        self.out_type = out_type
        widths = [a['width'] * 2**i for i in range(STAGES)]
        self.num_features = widths[-1]

        drop_path_rate = a['drop_path_rate'] if drop_path_rate is None else drop_path_rate
        drop_paths = iter(drop_path_rates(drop_path_rate, sum(a['depths'])))
        places = [Place(heads, pool_size) for heads, pool_size in zip(a['norm_heads'], pool_sizes, strict=True)]
        self.patch_embed = PatchEmbed(None, 4, embed_dim=widths[0], output_fmt='NHWC', dynamic_img_pad=True)
        self.patch_embed.norm = build_norm(check_other_norms(other_norm_cfg), widths[0], places[0])
        self.stages = nn.ModuleList()
        for i in range(STAGES):
            blocks = [
                Block(
                    widths[i],
                    WindowAttention(
                        widths[i],
                        a['num_heads'][i],
                        window_size,
                        shifted=j % 2 == 1,
                        shift_alone=out_type == 'featmap',
                    ),
                    ConvMlp(widths[i], MLP_RATIO * widths[i]),
                    next(drop_paths),
                    norm_cfg,
                    places[i],
                )
                for j in range(a['depths'][i])
            ]
            downsample: nn.Module = nn.Identity()
            if i > 0:
                downsample = PatchMerging(widths[i - 1])
                downsample.norm = build_norm(other_norm_cfg, 4 * widths[i - 1], places[i])
            self.stages.append(Stage(downsample, blocks, with_cp))
        for i in self.out_indices:
            self.add_module(f'norm{i}', build_norm(other_norm_cfg, widths[i], places[i]))
        self.last_norm = None if out_type == 'featmap' else f'norm{STAGES - 1}'
        if with_cp:
            self.check_checkpointing()
        self.make_room(fused)

    def init_weights(self) -> None:
        super().init_weights()
        if self.init_cfg is None:
            self.patch_embed.proj.reset_parameters()  # as published: torch's initialisation

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x = self.patch_embed(x)
        outs = []
        for i, stage in enumerate(self.stages):
            x = stage(x)
            if i in self.out_indices:
                outs.append(getattr(self, f'norm{i}')(x))
        if self.out_type == 'avg_featmap':
            return (outs[0].mean((1, 2)),)
        return tuple(out.permute(0, 3, 1, 2).contiguous() for out in outs)

    def frozen_parts(self) -> Iterator[nn.Module]:
        yield self.patch_embed
        yield from self.stages[: self.frozen_stages]
        yield from (getattr(self, f'norm{i}') for i in self.out_indices if i < self.frozen_stages)


class PatchEmbed(FusesNorms, layers.PatchEmbed):
    def neighbours(self) -> dict[str, Neighbour]:
        return dict(norm=Neighbour('proj', partial(fold_behind, self.proj)))


class PatchMerging(FusesNorms, swin_transformer.PatchMerging):
    def neighbours(self) -> dict[str, Neighbour]:
        return dict(norm=Neighbour('reduction', partial(fold_into, self.reduction)))


class Stage(nn.Module):
    """A stage of blocks. In all stages but the first, patch merging first halves the sides of the map."""

    def __init__(self, downsample: nn.Module, blocks: list[Block], with_cp: bool) -> None:
        super().__init__()
        self.with_cp = with_cp
        self.downsample = downsample
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        x = self.downsample(x)
        for block in self.blocks:
            x = run_block(block, x, again=self.with_cp)
        return x


class WindowAttention(swin_transformer.WindowAttention):
    """Attention within windows, which may be shifted, for maps of any size.

    The layer has the parameters of timm's ``WindowAttention``. Like MMDetection, and unlike timm, the layer pads maps
    before shifting them. Unlike timm, the layer does not build a mask of all windows for each image size. In a shifted
    map, only windows in the last row or column contain tokens from both ends of the map. Maps of any size thus have
    only four kinds of windows, and the layer stores one mask for each kind.

    Maps are padded with zeros, or with ``border`` after the fusion of a norm in front.
    """

    border: Tensor | None
    cuts: Tensor
    relative_position_index: Tensor

    def __init__(self, channels: int, num_heads: int, window_size: int, shifted: bool, shift_alone: bool) -> None:
        if channels % num_heads:
            raise ValueError(f'{num_heads} attention heads do not divide {channels} channels.')
        super().__init__(channels, num_heads, window_size=window_size)
        self.side = window_size
        self.shift = window_size // 2 if shifted else 0
        self.shift_alone = shift_alone  # whether to shift even a map that is not larger than a window
        self.register_buffer('border', None)
        if self.shift:
            self.register_buffer('cuts', _cuts(self.side, self.shift), persistent=False)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]  # takes a map, and no mask
        B, H, W, C = x.shape
        side, K = self.side, self.num_heads
        shift, exporting = self._shift_of(H, W), is_exporting()
        rows, columns = (H + side - 1) // side, (W + side - 1) // side
        below, right = rows * side - H, columns * side - W
        if exporting or below or right:  # an exported program always pads, because its image size is dynamic
            x = pad(x, below, right, self.border)
        shifts = self.shift > 0 if exporting else shift > 0  # an exported program always shifts, possibly by 0
        if shifts:
            x = _roll(x, -shift)
        bias = self.relative_position_bias_table[self.relative_position_index].permute(2, 0, 1)
        if shifts:
            bias = _of_all_windows(bias + self.cuts, rows, columns, shift // self.shift)
        qkv = self.qkv(x).view(B, rows, side, columns, side, 3, K, C // K).permute(5, 0, 1, 3, 6, 2, 4, 7)
        # The dimension of heads includes windows with different biases, so that all images of a batch share the biases.
        q, k, v = qkv.reshape(3, -1, bias.shape[0], side * side, C // K)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias[None].to(q.dtype))
        out = out.view(B, rows, columns, K, side, side, C // K).permute(0, 1, 4, 2, 5, 3, 6)
        x = out.reshape(B, rows * side, columns * side, C)
        if shifts:
            x = _roll(x, shift)
        return self.proj(x[:, :H, :W].contiguous())

    def _shift_of(self, height: int, width: int) -> int:
        """Returns the shift of a map. Without ``shift_alone``, maps that are not larger than a window have shift 0."""
        if self.shift_alone:
            return self.shift
        if is_exporting():  # an exported program would not keep a branch on the size
            return self.shift * torch.sym_min(torch.sym_min(height, width) // (self.side + 1), 1)
        return self.shift if min(height, width) > self.side else 0

    def take_in(self, a: Tensor, b: Tensor) -> None:
        """Fuses the norm in front of the attention."""
        self.border = border_in_front(self.qkv, self.border, a, b)
        fold_into(self.qkv, a, b)


def _roll(x: Tensor, shift: int) -> Tensor:
    if isinstance(shift, int):
        return x.roll((shift, shift), (1, 2))
    for axis in (1, 2):  # torch.roll would have a fixed shift in ONNX
        end = (x.shape[axis] - shift) % x.shape[axis]
        x = torch.cat((x.narrow(axis, end, x.shape[axis] - end), x.narrow(axis, 0, end)), axis)
    return x


def _cuts(side: int, shift: int) -> Tensor:
    """Returns the attention masks ``2 x 2 x 1 x N x N`` of the four kinds of windows in a shifted map.

    The first two indices tell whether a window is in the last row and whether it is in the last column. Masks are
    ``-inf`` between tokens from different ends of the map.
    """
    token = torch.arange(side * side)
    from_top, from_left = token // side >= side - shift, token % side >= side - shift
    across_rows, across_columns = (end[:, None] != end for end in (from_top, from_left))
    parted = torch.stack((across_rows & ~across_rows, across_columns, across_rows, across_rows | across_columns))
    return torch.zeros(parted.shape).masked_fill(parted, float('-inf')).view(2, 2, 1, side * side, side * side)


def _of_all_windows(kinds: Tensor, rows: int, columns: int, shifted: int) -> Tensor:
    """Selects the bias of each window from ``2 x 2 x K x N x N``, and returns ``(rows columns K) x N x N``.

    The first two indices of ``kinds`` tell whether a window is in the last row and whether it is in the last column.
    ``shifted`` is 1 for a shifted map and 0 otherwise.
    """
    row, column = ((torch.arange(n, device=kinds.device) == n - 1).long() * shifted for n in (rows, columns))
    return kinds.index_select(0, row).index_select(1, column).flatten(0, 2)


def _arch(arch: str | dict) -> dict[str, Any]:
    """Returns the fields of an architecture. ``norm_heads`` defaults to the attention's numbers of heads."""
    said = architecture(arch, ARCHS, optional=('norm_heads',))
    return dict(norm_heads=said['num_heads']) | said


ARCHS: dict[str, dict[str, Any]] = dict(
    tiny=dict(width=96, depths=(2, 2, 6, 2), num_heads=(3, 6, 12, 24), drop_path_rate=0.2),
    small=dict(width=96, depths=(2, 2, 18, 2), num_heads=(3, 6, 12, 24), drop_path_rate=0.3),
    base=dict(width=128, depths=(2, 2, 18, 2), num_heads=(4, 8, 16, 32), drop_path_rate=0.5),
)
