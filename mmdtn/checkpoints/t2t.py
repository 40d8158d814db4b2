"""T2T-ViT: formats of its checkpoints, and their translation, which depends on keys and tensors alone.

Files hold the table of positions, which the model computes. Here the class token has no position, so that it can join
before any block: a translated token includes the position that it had.
"""

import re
from collections.abc import Callable

import torch
from torch import Tensor

from .format import Format, State, without
from .vit import check_class_token, published_heads

COMPUTED = {'pos_embed$': 'computed from the size of the image'}


def from_t2t(state: State) -> State:
    """The authors' ``T2T_ViT``, its token module of transformers or of performers."""
    out: State = {}
    for key, value in without(state, COMPUTED).items():
        if key == 'cls_token':
            out[key] = (value + sines(1, value.shape[-1]).to(value))[:, None]
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


def sines(positions: int, channels: int) -> Tensor:
    """The table of "Attention Is All You Need", ``positions x channels``: sines in even channels, cosines in odd."""
    pair = torch.arange(channels, dtype=torch.float64) // 2
    angles = torch.arange(positions, dtype=torch.float64)[:, None] / 10000 ** (2 * pair / channels)
    even = torch.arange(channels) % 2 == 0
    return torch.where(even, angles.sin(), angles.cos()).float()


def _format(convert: Callable[[State], State], *marks: str) -> Format:
    return Format(
        'T2TViTDTN',
        marks,
        convert,
        dropped=COMPUTED,
        heads=published_heads,
        eps=lambda norm, state: 1e-5,
        check=check_class_token,
        out_type='cls_token',
    )


FORMATS = {
    't2t': _format(from_t2t, r'tokens_to_token\.attention1\.', r'blocks\.0\.'),
    'mmpretrain-t2t': _format(from_mmpretrain_t2t, r'tokens_to_token\.attention1\.', r'encoder\.0\.'),
    'mmdtn-t2t': Format('T2TViTDTN', (r'patch_embed\.attention1\.', r'blocks\.0\.attn\.q\.')),
}
