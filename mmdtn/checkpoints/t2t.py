"""State dicts of other people's T2T-ViT as ours; as functions of key and tensor alone.

The position table is left out: it is computed. Ours gives none of it to the class token, so that it can join anywhere.
"""

import re

import torch
from torch import Tensor

State = dict[str, Tensor]


def from_t2t(state: State) -> State:
    """The authors' ``T2T_ViT``, its token module of transformers or of performers."""
    out: State = {}
    for key, value in state.items():
        if key == 'pos_embed':
            continue
        if key == 'cls_token':
            first_row = torch.arange(value.shape[-1]) % 2  # sines of 0, and cosines
            out[key] = (value + first_row.to(value))[:, None]
        elif match := re.fullmatch(r'tokens_to_token\.(project\..+|attention[12]\..+)', key):
            out |= _token_layer(f'patch_embed.{match[1]}', value)
        elif '.attn.qkv.' in key:
            C = value.shape[0] // 3
            out[key.replace('qkv', 'q')], out[key.replace('qkv', 'kv')] = value[:C], value[C:]
        elif key.startswith(('blocks.', 'norm.')):
            out[key] = value
        else:
            raise ValueError(f"{key} is no key of T2T-ViT's authors.")
    return out


def _token_layer(key: str, value: Tensor) -> State:
    if '.kqv.' in key:  # a performer's
        k, q, v = value.chunk(3)
        return {key.replace('kqv', 'qkv'): torch.cat((q, k, v))}
    key = key.replace('.mlp.0.', '.fc1.').replace('.mlp.2.', '.fc2.')
    return {re.sub(r'\.w$', '.features', key.replace('.attn.', '.').replace('.mlp.', '.')): value}


def from_mmpretrain_t2t(state: State) -> State:
    """MMPretrain's ``T2T_ViT``."""
    out: State = {}
    for key, value in state.items():
        if not key.startswith(('tokens_to_token.', 'encoder.', 'cls_token', 'pos_embed', 'norm.')):
            raise ValueError(f"{key} is no key of MMPretrain's T2T_ViT.")
        for theirs, authors in {
            r'^encoder\.': 'blocks.',
            r'\.ln([12])\.': r'.norm\1.',
            r'\.ffn\.layers\.0\.0\.': '.mlp.fc1.',
            r'\.ffn\.layers\.1\.': '.mlp.fc2.',
        }.items():
            key = re.sub(theirs, authors, key)
        out[key] = value
    return from_t2t(out)
