"""The published kinds of files: how each is recognised, read, and what of it a model of ours has no use for."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from .dtn import from_dtn_pvt, from_dtn_vit
from .dvt import from_dvt
from .levit import from_levit, from_mmpretrain_levit, from_timm_levit
from .pvt import from_mmdet_pvt, from_pvt, from_timm_pvt_v2
from .swin import from_microsoft_swin, from_mmdet_swin, from_mmpretrain_swin, from_timm_swin
from .t2t import from_mmpretrain_t2t, from_t2t
from .vit import from_mmpretrain_vit, from_timm_vit

State = dict[str, Tensor]
Heads = Callable[[str, State], int | None]


def _pvt_heads(attention: str, state: State) -> int | None:
    """Of ``attention``, as ``'stages.0.blocks.0.attn'``: every published PVT has these, and no tensor tells them."""
    return (1, 2, 5, 8)[int(attention.split('.')[1])]


def _vit_heads(attention: str, state: State) -> int | None:
    return state[f'{attention}.q.weight'].shape[0] // 64  # so it is in all ViT, DeiT and T2T-ViT


def _dvt_heads(attention: str, state: State) -> int | None:
    """By the channels of relationship reuse; without it those of the published models, 64 wide."""
    relations = state.get('exits.1.relations.conv2.bias')
    if relations is not None:
        return len(relations) // len([key for key in state if re.match(r'exits\.0\.blocks\.\d+\.norm1\.weight', key)])
    width = state[f'{attention}.proj.weight'].shape[0]
    return width // 64 if width in (256, 384) else None


def _dtn_heads(attention: str, state: State) -> int | None:
    """Those of the block's DTN; the last blocks of ViT have as many as the first, the last stage of PVT has 8."""
    first = 'blocks.0.norm1.var_mix'
    own = state.get(attention.removesuffix('attn') + 'norm1.var_mix')
    own = state.get(first) if own is None else own
    return 8 if own is None else own.shape[0]


def _own_pvt_heads(attention: str, state: State) -> int | None:
    """Of files of this package only the config tells them, but with LayerNorm at published widths these."""
    stage, width = int(attention.split('.')[1]), state[f'{attention}.q.weight'].shape[0]
    published = width in ((32, 64), (64, 128), (160, 320), (256, 512))[stage]
    with_dtn = any(key.endswith('.var_mix') for key in state)
    return _pvt_heads(attention, state) if published and not with_dtn else None


def _unsaid(attention: str, state: State) -> int | None:
    """The bias tables of Swin and LeViT have the heads in their shape; ViT has them as its config says."""
    return None


@dataclass(frozen=True)
class Format:
    """``marks`` are patterns of which a file has all, ``misses`` those of which it has none."""

    backbone: str  # the class of ours that such a file is for
    marks: tuple[str, ...]
    convert: Callable[[State], State]
    heads: Heads
    misses: tuple[str, ...] = ()
    dropped: Mapping[str, str] = field(default_factory=dict)  # pattern: why

    def recognises(self, keys: Iterable[str]) -> bool:
        keys = list(keys)
        return all(_any(m, keys) for m in self.marks) and not any(_any(m, keys) for m in self.misses)


def _any(pattern: str, keys: list[str]) -> bool:
    return any(re.match(pattern, key) for key in keys)


_SWIN = {r'.*\.(relative_position_index|attn_mask)$': 'computed from the window size'}
_LEVIT = {r'.*\.attention_bias_idxs$': 'computed from the size of the image'}
_T2T = {'pos_embed$': 'computed from the size of the image'}
_DTN = {
    r'.*\.pos_proj\.bias$': 'the softmax over neighbours cancels it',
    r'.*\.rel_indices$': 'computed from the grid of each input',
}
FORMATS = {
    'pvt': Format('PVTDTN', (r'patch_embed1\.', r'block1\.'), from_pvt, _pvt_heads, misses=(r'.*norm_weight$',)),
    'mmdet-pvt': Format('PVTDTN', (r'layers\.0\.0\.projection', r'layers\.0\.1\.'), from_mmdet_pvt, _pvt_heads),
    'timm-pvt': Format(
        'PVTDTN', (r'patch_embed\.proj', r'stages\.0\.blocks\.0\.attn\.kv'), from_timm_pvt_v2, _pvt_heads
    ),
    'swin': Format(
        'SwinDTN',
        (r'layers\.0\.blocks\.0\.attn\.relative_position_bias_table', r'layers\.0\.downsample'),
        from_microsoft_swin,
        _unsaid,
        dropped=_SWIN,
    ),
    'timm-swin': Format(
        'SwinDTN',
        (r'layers\.0\.blocks\.0\.attn\.relative_position_bias_table', r'layers\.3\.downsample'),
        from_timm_swin,
        _unsaid,
        dropped=_SWIN,
    ),
    'mmdet-swin': Format(
        'SwinDTN',
        (r'stages\.0\.blocks\.0\.attn\.w_msa', r'norm[012]\.'),
        from_mmdet_swin,
        _unsaid,
        dropped=_SWIN,
    ),
    'mmpretrain-swin': Format(
        'SwinDTN',
        (r'stages\.0\.blocks\.0\.attn\.w_msa', r'norm3\.'),
        from_mmpretrain_swin,
        _unsaid,
        misses=(r'norm[012]\.',),
        dropped=_SWIN,
    ),
    'timm-vit': Format(
        'ViTDTN',
        (r'patch_embed\.proj', r'blocks\.0\.attn\.qkv', 'cls_token', 'pos_embed'),
        from_timm_vit,
        _vit_heads,
        misses=(r'.*norm_weight$', 'dist_token'),
    ),
    'mmpretrain-vit': Format(
        'ViTDTN', (r'patch_embed\.projection', r'layers\.0\.ln1\.', 'cls_token'), from_mmpretrain_vit, _vit_heads
    ),
    't2t': Format('T2TViTDTN', (r'tokens_to_token\.attention1\.', r'blocks\.0\.'), from_t2t, _vit_heads, dropped=_T2T),
    'mmpretrain-t2t': Format(
        'T2TViTDTN', (r'tokens_to_token\.attention1\.', r'encoder\.0\.'), from_mmpretrain_t2t, _vit_heads, dropped=_T2T
    ),
    'levit': Format('LeViTDTN', (r'patch_embed\.0\.c\.', r'blocks\.0\.m\.qkv\.'), from_levit, _unsaid, dropped=_LEVIT),
    'timm-levit': Format(
        'LeViTDTN', (r'stem\.conv1\.', r'stages\.0\.blocks\.0\.attn\.qkv\.'), from_timm_levit, _unsaid, dropped=_LEVIT
    ),
    'mmpretrain-levit': Format(
        'LeViTDTN',
        (r'patch_embed\.patch_embed\.0\.', r'stages\.0\.0\.block\.qkv\.'),
        from_mmpretrain_levit,
        _unsaid,
        dropped=_LEVIT,
    ),
    'dtn-pvt': Format('PVTDTN', (r'patch_embed1\.', r'.*\.var_norm_weight$'), from_dtn_pvt, _dtn_heads, dropped=_DTN),
    'dtn-vit': Format(
        'ViTDTN', (r'patch_embed\.proj', r'.*\.var_norm_weight$'), from_dtn_vit, _dtn_heads, dropped=_DTN
    ),
    'dvt': Format('DVT', (r'(less_less|less|normal)_token\.blocks\.0\.',), from_dvt, _dvt_heads),
    'mmdtn-pvt': Format('PVTDTN', (r'stages\.0\.patch_embed\.proj',), dict, _own_pvt_heads),
    'mmdtn-swin': Format('SwinDTN', (r'stages\.0\.blocks\.0\.attn\.relative_position_bias_table',), dict, _unsaid),
    'mmdtn-levit': Format(
        'LeViTDTN', (r'patch_embed\.conv1\.', r'stages\.0\.blocks\.0\.attn\.attention_biases$'), dict, _unsaid
    ),
    'mmdtn-vit': Format('ViTDTN', (r'blocks\.0\.attn\.q\.',), dict, _unsaid, misses=(r'patch_embed\.attention1',)),
    'mmdtn-t2t': Format('T2TViTDTN', (r'patch_embed\.attention1\.', r'blocks\.0\.attn\.q\.'), dict, _unsaid),
    'mmdtn-dvt': Format('DVT', (r'exits\.0\.blocks\.0\.',), dict, _unsaid),
}
# What users say, where it is not the name of one format: the candidates.
GROUPS = {whose: tuple(name for name in FORMATS if name.startswith(f'{whose}-')) for whose in ('timm', 'dtn', 'mmdtn')}
GROUPS['auto'] = tuple(FORMATS)
CHOICES = (*(name for name in FORMATS if name.partition('-')[0] not in GROUPS), *GROUPS)


def recognise(keys: Iterable[str], said: str) -> str:
    """The one format that has such keys, among those that ``said`` stands for."""
    if said not in CHOICES:
        raise ValueError(f'Unknown format {said!r}; choose one of {", ".join(CHOICES)}.')
    keys, among = list(keys), GROUPS.get(said, (said,))
    fitting = [name for name in among if FORMATS[name].recognises(keys)]
    if len(fitting) != 1:
        found = f'fit {fitting}' if fitting else 'fit none of them'
        raise ValueError(f'Tried the formats {", ".join(among)}: the keys {found}. The first keys are {keys[:4]}.')
    return fitting[0]
