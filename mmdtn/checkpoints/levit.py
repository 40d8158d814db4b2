"""Formats of LeViT checkpoints. All formats contain the same tensors, so only the keys are translated."""

import bisect
import re
from collections.abc import Callable

from torch import nn

from .format import Format, State, without

COMPUTED = {r'.*\.attention_bias_idxs$': 'computed from the size of the image'}


def from_timm_levit(state: State) -> State:
    """Translates timm's ``levit_*``."""
    out: State = {}
    for key, value in without(state, COMPUTED).items():
        if match := re.fullmatch(r'stages\.(\d)\.(downsample|blocks\.(\d+))\.(.+)', key):
            stage, block, rest = int(match[1]), match[3], match[4].replace('attn_downsample.', 'attn.')
            # timm's separate module `downsample` is the first block of a stage in this package.
            index = 0 if block is None else int(block) + (stage > 0)
            out[f'stages.{stage}.blocks.{index}.{rest}'] = value
        elif key.startswith('stem.'):
            out[key.replace('stem.', 'patch_embed.')] = value
        else:
            raise ValueError(f"{key} is not a key of timm's LeViT.")
    return out


def from_mmpretrain_levit(state: State) -> State:
    """Translates MMPretrain's ``LeViT``."""
    out: State = {}
    for key, value in without(state, COMPUTED).items():
        if match := re.fullmatch(r'patch_embed\.patch_embed\.(\d)\.(.+)', key):
            out[_stem(int(match[1]), match[2])] = value
        elif match := re.fullmatch(r'stages\.(\d)\.(\d+)\.(?:block\.)?(.+)', key):
            out[_sub_block(int(match[1]), int(match[2]), match[3])] = value
        else:
            raise ValueError(f"{key} is not a key of MMPretrain's LeViT.")
    return out


def from_levit(state: State) -> State:
    """Translates the authors' ``LeViT``, which numbers its sub-blocks across all stages."""
    starts = [0, *sorted({int(match[1]) for key in state if (match := re.match(r'blocks\.(\d+)\.kv\.', key))})]
    out: State = {}
    for key, value in without(state, COMPUTED).items():
        if match := re.fullmatch(r'patch_embed\.(\d)\.(.+)', key):
            out[_stem(int(match[1]), match[2])] = value
        elif match := re.fullmatch(r'blocks\.(\d+)\.(?:m\.)?(.+)', key):
            stage = bisect.bisect_right(starts, int(match[1])) - 1
            out[_sub_block(stage, int(match[1]) - starts[stage], match[2])] = value
        else:
            raise ValueError(f"{key} is not a key of the authors' LeViT.")
    return out


def _stem(layer: int, rest: str) -> str:
    """Translates a key of the stem. Even layers are convolutions, and odd layers are activations."""
    return f'patch_embed.conv{layer // 2 + 1}.' + re.sub(r'^(c|conv)\.', 'linear.', rest)


def _sub_block(stage: int, index: int, rest: str) -> str:
    """Translates a key of a sub-block. Even sub-blocks are attention layers, and odd sub-blocks are MLPs."""
    for theirs, ours in {
        r'\.c\.': '.linear.',
        r'^(q|proj)\.1\.': r'\1.ln.',
        r'^(0|linear1)\.': 'ln1.',
        r'^(2|linear2)\.': 'ln2.',
    }.items():
        rest = re.sub(theirs, ours, rest)
    return f'stages.{stage}.blocks.{index // 2}.{"mlp" if index % 2 else "attn"}.{rest}'


def _check_norms(backbone: nn.Module) -> str:
    if not any('.norm' in key for key in backbone.state_dict()):
        return ''
    return (
        'have no norm before attention and MLPs, but the target has one. With the same weights, the target would '
        'compute different outputs. Set norm_cfg=None.'
    )


def _format(convert: Callable[[State], State], *marks: str) -> Format:
    return Format(
        'LeViTDTN',
        marks,
        convert,
        dropped=COMPUTED,
        check=_check_norms,
        norm_cfg=None,
        out_type='avg_featmap',
    )


FORMATS = {
    'levit': _format(from_levit, r'patch_embed\.0\.c\.', r'blocks\.0\.m\.qkv\.'),
    'timm-levit': _format(from_timm_levit, r'stem\.conv1\.', r'stages\.0\.blocks\.0\.attn\.qkv\.'),
    'mmpretrain-levit': _format(from_mmpretrain_levit, r'patch_embed\.patch_embed\.0\.', r'stages\.0\.0\.block\.qkv\.'),
    'mmdtn-levit': Format('LeViTDTN', (r'patch_embed\.conv1\.', r'stages\.0\.blocks\.0\.attn\.attention_biases$')),
}
