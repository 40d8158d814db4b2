"""Formats of Swin checkpoints."""

import re
from collections.abc import Callable

from .format import Format, State, without

COMPUTED = {r'.*\.(relative_position_index|attn_mask)$': 'computed from the window size'}


def from_mmdet_swin(state: State) -> State:
    """Translates MMDetection's ``SwinTransformer``."""
    out: State = {}
    for key, value in _rename(state, 'stages', merging_first=False, whose="MMDetection's SwinTransformer").items():
        if re.search(r'\.downsample\.(norm|reduction)\.', key):
            # Patch merging joins four tokens. The joined values are ordered by channel, row and column in MMDetection,
            # and by column, row and channel in this package.
            value = value.unflatten(-1, (-1, 2, 2)).transpose(-1, -3).flatten(-3)
        for theirs, ours in {
            'patch_embed.projection.': 'patch_embed.proj.',
            '.attn.w_msa.': '.attn.',
            '.ffn.layers.0.0.': '.mlp.fc1.',
            '.ffn.layers.1.': '.mlp.fc2.',
        }.items():
            key = key.replace(theirs, ours)
        out[key] = value
    return out


def from_mmpretrain_swin(state: State) -> State:
    """Translates MMPretrain's ``SwinTransformer``, which uses MMDetection's layout with a single norm at the end."""
    return from_mmdet_swin(state)


def from_microsoft_swin(state: State) -> State:
    """Translates the entry ``model`` of Microsoft's ``swin_*_patch4_window7_224.pth``."""
    return _rename(state, 'layers', merging_first=False, whose="Microsoft's Swin")


def from_timm_swin(state: State) -> State:
    """Translates timm's ``swin_*``."""
    return _rename(state, 'layers', merging_first=True, whose="timm's Swin")


def _rename(state: State, stages: str, merging_first: bool, whose: str) -> State:
    """Renames stages and norms.

    In this package, patch merging is the first part of a stage. In some formats, it is the last part of the previous
    stage.
    """
    out: State = {}
    for key, value in without(state, [*COMPUTED, r'head\.']).items():
        if match := re.fullmatch(rf'{stages}\.(\d)\.(blocks|downsample)\.(.+)', key):
            stage, part, rest = int(match[1]), match[2], match[3]
            if part == 'downsample':
                stage += not merging_first
                if not 1 <= stage <= 3:
                    raise ValueError(f'{key} is not a key of {whose}, which has its patch mergings in other stages.')
            key = f'stages.{stage}.{part}.{rest}'
        elif not re.match(r'(patch_embed|norm[0-3]?)\.', key):
            raise ValueError(f'{key} is not a key of {whose}.')
        out[re.sub(r'^norm\.', 'norm3.', key)] = value
    return out


def _format(convert: Callable[[State], State], *marks: str, misses: tuple[str, ...] = (), out_type: str) -> Format:
    return Format('SwinDTN', marks, convert, misses, dropped=COMPUTED, eps=lambda norm, state: 1e-5, out_type=out_type)


TABLE = r'0\.blocks\.0\.attn\.relative_position_bias_table'  # the shape of a bias table contains the number of heads
WINDOWS = r'stages\.0\.blocks\.0\.attn\.w_msa'
FORMATS = {
    'swin': _format(from_microsoft_swin, rf'layers\.{TABLE}', r'layers\.0\.downsample', out_type='avg_featmap'),
    'timm-swin': _format(from_timm_swin, rf'layers\.{TABLE}', r'layers\.3\.downsample', out_type='avg_featmap'),
    'mmdet-swin': _format(from_mmdet_swin, WINDOWS, r'norm[012]\.', out_type='featmap'),
    'mmpretrain-swin': _format(
        from_mmpretrain_swin, WINDOWS, r'norm3\.', misses=(r'norm[012]\.',), out_type='avg_featmap'
    ),
    'mmdtn-swin': Format('SwinDTN', (rf'stages\.{TABLE}',)),
}
