"""State dicts of other people's LeViT as ours; as functions of key and tensor alone.

All of them hold the same tensors. The indices of the attention's biases are left out: they are computed.
"""

import bisect
import re

from torch import Tensor

State = dict[str, Tensor]
INDICES = '.attention_bias_idxs'


def from_timm_levit(state: State) -> State:
    """timm's ``levit_*``."""
    out: State = {}
    for key, value in state.items():
        if key.endswith(INDICES):
            continue
        if match := re.fullmatch(r'stages\.(\d)\.(downsample|blocks\.(\d+))\.(.+)', key):
            stage, block, rest = int(match[1]), match[3], match[4].replace('attn_downsample.', 'attn.')
            # Our second and third stages begin with what timm has apart, as downsample.
            index = 0 if block is None else int(block) + (stage > 0)
            out[f'stages.{stage}.blocks.{index}.{rest}'] = value
        elif key.startswith('stem.'):
            out[key.replace('stem.', 'patch_embed.')] = value
        else:
            raise ValueError(f"{key} is no key of timm's LeViT.")
    return out


def from_mmpretrain_levit(state: State) -> State:
    """MMPretrain's ``LeViT``."""
    out: State = {}
    for key, value in state.items():
        if key.endswith(INDICES):
            continue
        if match := re.fullmatch(r'patch_embed\.patch_embed\.(\d)\.(.+)', key):
            out[_stem(int(match[1]), match[2])] = value
        elif match := re.fullmatch(r'stages\.(\d)\.(\d+)\.(?:block\.)?(.+)', key):
            out[_sub_block(int(match[1]), int(match[2]), match[3])] = value
        else:
            raise ValueError(f"{key} is no key of MMPretrain's LeViT.")
    return out


def from_levit(state: State) -> State:
    """The authors' ``LeViT``, whose sub-blocks are numbered through all stages."""
    starts = [0, *sorted({int(match[1]) for key in state if (match := re.match(r'blocks\.(\d+)\.kv\.', key))})]
    out: State = {}
    for key, value in state.items():
        if key.endswith(INDICES):
            continue
        if match := re.fullmatch(r'patch_embed\.(\d)\.(.+)', key):
            out[_stem(int(match[1]), match[2])] = value
        elif match := re.fullmatch(r'blocks\.(\d+)\.(?:m\.)?(.+)', key):
            stage = bisect.bisect_right(starts, int(match[1])) - 1
            out[_sub_block(stage, int(match[1]) - starts[stage], match[2])] = value
        else:
            raise ValueError(f"{key} is no key of LeViT's authors.")
    return out


def _stem(layer: int, rest: str) -> str:
    """Convolutions have the even numbers, activations the odd ones."""
    return f'patch_embed.conv{layer // 2 + 1}.' + re.sub(r'^(c|conv)\.', 'linear.', rest)


def _sub_block(stage: int, index: int, rest: str) -> str:
    """Attention has the even numbers, MLPs the odd ones."""
    for theirs, ours in {
        r'\.c\.': '.linear.',
        r'^(q|proj)\.1\.': r'\1.ln.',
        r'^(0|linear1)\.': 'ln1.',
        r'^(2|linear2)\.': 'ln2.',
    }.items():
        rest = re.sub(theirs, ours, rest)
    return f'stages.{stage}.blocks.{index // 2}.{"mlp" if index % 2 else "attn"}.{rest}'
