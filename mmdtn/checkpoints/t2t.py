"""Formats of T2T-ViT checkpoints. The translation depends only on keys and tensors.

The formats include T2T-ViTs with Unified Normalization (UN) instead of LayerNorm, which the authors of UN publish.

Most files contain a table of sines for positions, which the model computes itself. In this package, the class token has
no position embedding, so that it can join before any block. A translated class token therefore includes its original
position embedding.
"""

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .format import Format, State
from .vit import check_class_token, published_heads

SCALE = 16  # side of a token in pixels
UN = dict(
    running_var='phi', ema_gz='psi', iters='count', buffer_x2='squares', buffer_gz='grads', skip_counter='skipped'
)


def from_t2t(state: State) -> State:
    """Translates the authors' ``T2T_ViT``. The token module consists of transformer or performer layers."""
    out: State = {}
    for key, value in state.items():
        if key == 'cls_token':
            table = state.get('pos_embed', sines(1, value.shape[-1])[None])
            out[key] = (value.double() + table[:, :1].double())[:, None]  # float64 avoids rounding twice
        elif key == 'pos_embed':
            side = _side(value)
            out[key] = value[:, 1:].reshape(1, side, side, -1)
        elif match := re.fullmatch(r'tokens_to_token\.(project\..+|attention[12]\..+)', key):
            out |= _token_layer(f'patch_embed.{match[1]}', value)
        elif '.attn.qkv.' in key:
            C = value.shape[0] // 3
            out[key.replace('qkv', 'q')], out[key.replace('qkv', 'kv')] = value[:C], value[C:]
        elif key.startswith(('blocks.', 'norm.')):
            out[key] = value
        else:
            raise ValueError(f"{key} is not a key of the authors' T2T-ViT.")
    return dict(_unified(key, value) for key, value in out.items())


def _unified(key: str, value: Tensor) -> tuple[str, Tensor]:
    """Renames a buffer of UN. The authors' counters have one element, whereas this package uses scalars."""
    norm, _, part = key.rpartition('.')
    if part not in UN:
        return key, value
    return f'{norm}.{UN[part]}', value.reshape(()) if part in ('iters', 'skip_counter') else value


def _token_layer(key: str, value: Tensor) -> State:
    if '.kqv.' in key:  # performer layers concatenate key, query and value in this order
        k, q, v = value.chunk(3)
        return {key.replace('kqv', 'qkv'): torch.cat((q, k, v))}
    key = key.replace('.mlp.0.', '.fc1.').replace('.mlp.2.', '.fc2.')
    return {re.sub(r'\.w$', '.features', key.replace('.attn.', '.').replace('.mlp.', '.')): value}


def from_mmpretrain_t2t(state: State) -> State:
    """Translates MMPretrain's ``T2T_ViT``."""
    out: State = {}
    for key, value in state.items():
        if not key.startswith(('tokens_to_token.', 'encoder.', 'cls_token', 'pos_embed', 'norm.')):
            raise ValueError(f"{key} is not a key of MMPretrain's T2T_ViT.")
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
    """Computes the ``positions x channels`` table of "Attention Is All You Need".

    Even channels contain sines, and odd channels contain cosines.
    """
    pair = torch.arange(channels, dtype=torch.float64) // 2
    angles = torch.arange(positions, dtype=torch.float64)[:, None] / 10000 ** (2 * pair / channels)
    even = torch.arange(channels) % 2 == 0
    return torch.where(even, angles.sin(), angles.cos()).float()


def is_sines(table: Tensor) -> bool:
    """Returns whether a ``1 x positions x channels`` table equals the result of :func:`sines` up to its precision."""
    want = sines(*table.shape[1:])[None]
    return torch.allclose(table.double(), want.double(), rtol=0, atol=max(1e-5, torch.finfo(table.dtype).eps))


def _side(table: Tensor) -> int:
    side = math.isqrt(table.shape[1] - 1)
    if side * side != table.shape[1] - 1:
        raise ValueError(
            f'pos_embed has {table.shape[1]} rows. Expected one row for the class token and the rows of a square grid.'
        )
    return side


def _settings(state: State) -> dict[str, Any]:
    """Determines the normaliser, the image size of the position table, and whether the table was learned."""
    settings: dict[str, Any] = {}
    if (squares := state.get('blocks.0.norm1.buffer_x2')) is not None:
        grads, norm_cfg = state['blocks.0.norm1.buffer_gz'], dict[str, Any](type='UN')
        norm_cfg |= {} if len(squares) == len(grads) == 4 else dict(window=len(squares), grad_window=len(grads))
        settings |= dict(norm_cfg=norm_cfg, other_norm_cfg=norm_cfg)
    table = state.get('pos_embed')
    if table is None:
        return settings
    size = SCALE * _side(table)
    settings |= dict(img_size=size) if size != 224 else {}
    return settings | ({} if is_sines(table) else dict(learned_positions=True))


def _norms(norm: str, state: State) -> Sequence[dict[str, Any]]:
    return [dict(type='UN', eps=1e-5)] if f'{norm}.squares' in state else []


def _computed(ours: State, backbone: nn.Module) -> dict[str, str]:
    """Returns the position table's key and the reason for dropping it if the model computes the same table."""
    table, own = ours.get('pos_embed'), dict(backbone.named_buffers()).get('pos_embed')
    if table is None or own is None:  # a learned position embedding accepts any table
        return {}
    lead = sines(1, table.shape[3])[None].to(table)
    img_size = SCALE * table.shape[1]
    if not is_sines(torch.cat((lead, table.flatten(1, 2)), 1)):
        raise ValueError(
            'pos_embed is not the table of sines that the target computes. The table was learned, or interpolated to '
            f'another image size. Set learned_positions=True and img_size={img_size}.'
        )
    if table.shape != own.shape:
        raise ValueError(
            f'pos_embed is the table of sines for {img_size} px, but the target computes the table for '
            f'{SCALE * own.shape[1]} px. Set img_size={img_size}. The model resizes the table for other images.'
        )
    return dict(pos_embed='the model computes this table of sines')


def published_t2t_heads(attention: str, state: State) -> tuple[int, ...]:
    """Returns the possible numbers of heads in published T2T-ViTs.

    Heads have 64 channels, except in t2t_vit_14_resnext. Its 32 heads have 12 channels each, and its tensors look like
    those of t2t_vit_14.
    """
    heads = published_heads(attention, state)
    performer = 'patch_embed.attention1.features' in state
    return (heads, 32) if heads == 6 and performer else (heads,)


def _note(state: State) -> str:
    notes = []
    if len(published_t2t_heads('blocks.0.attn', state)) > 1:
        notes.append('heads are taken from the target: t2t_vit_14 (6 heads) has the tensors of t2t_vit_14_resnext (32)')
    if 'norm.squares' in state:
        notes.append('warm-up and filter of UN are taken from the target, because the tensors do not determine them')
    return '; '.join(notes)


def _format(convert: Callable[[State], State], *marks: str) -> Format:
    return Format(
        'T2TViTDTN',
        marks,
        convert,
        heads=published_t2t_heads,
        eps=lambda norm, state: 1e-5,
        norms=_norms,
        settings=_settings,
        computed=_computed,
        note=_note,
        check=check_class_token,
        out_type='cls_token',
    )


FORMATS = {
    't2t': _format(from_t2t, r'tokens_to_token\.attention1\.', r'blocks\.0\.'),
    'mmpretrain-t2t': _format(from_mmpretrain_t2t, r'tokens_to_token\.attention1\.', r'encoder\.0\.'),
    'mmdtn-t2t': Format('T2TViTDTN', (r'patch_embed\.attention1\.', r'blocks\.0\.attn\.q\.')),
}
