"""Formats of the DTN authors' published code, which trains PVT and ViT, and their translation."""

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from mmdtn.norms import DTN

from .format import Eps, Format, State
from .pvt import from_pvt, published_eps
from .vit import from_timm_vit, is_of_dtns_authors

NORM_CFG = dict(type='DTN', unbiased=True, pool_second_moment=False)
CLS_FROM = 10  # the block before which their class token joins
LN_1E_5: dict[str, Any] = dict(other_norm_cfg=dict(type='LN', eps=1e-5))  # torch's default; timm's ViT has 1e-6


def from_dtn_pvt(state: State) -> State:
    return _rename_layers(from_pvt(state))


def from_dtn_vit(state: State) -> State:
    return _rename_layers(from_timm_vit(state))


def _rename_layers(state: State) -> State:
    """Their layers project (dx, dy, dx^2 + dy^2) to scores. Their shift leads from key to query, ours the other way."""
    out: State = {}
    for key, value in state.items():
        if key.endswith('.pos_proj.weight'):
            dx, dy, square = value.unbind(1)
            value = torch.stack((square, -dx, -dy), 1)
        key = re.sub(r'\.(mean|var)_norm_weight$', r'.\1_mix', key)
        out[key.replace('.pos_proj.weight', '.position')] = value
    return out


def _heads(attention: str, state: State) -> int:
    """Those of the block's DTN; the last blocks of ViT have as many as the first, the last stage of PVT has 8."""
    first = 'blocks.0.norm1.var_mix'
    own = state.get(attention.removesuffix('attn') + 'norm1.var_mix')
    own = state.get(first) if own is None else own
    return 8 if own is None else own.shape[0]


def _check_class_token(backbone: nn.Module) -> str:
    cls_from = getattr(backbone, 'cls_from', None)
    if cls_from in (None, CLS_FROM):
        return ''
    return (
        f'have the class token from block {CLS_FROM} on, but the target takes it before block {cls_from}: with the '
        f'same weights it would compute something else. It needs cls_from={CLS_FROM}.'
    )


def _check_settings(backbone: nn.Module) -> str:
    for layer in (m for m in backbone.modules() if isinstance(m, DTN)):
        s = layer.settings
        if not (s.prenorm and s.unbiased and (s.pool_second_moment is False or s.pool_size == 1)):
            return f'need norm_cfg={NORM_CFG}, but the target has DTN({layer.extra_repr()}).'
    return ''


def _eps_of_pvt(norm: str, state: State) -> float:
    return 1e-5 if f'{norm}.var_mix' in state else published_eps(norm, state)


def _check_vit(backbone: nn.Module) -> str:
    """Files tell the number of blocks with DTN, behind which the class token joins."""
    cls_from = getattr(backbone, 'cls_from', None)
    inside = {name for name, m in backbone.named_modules() if isinstance(m, DTN) and name.endswith('norm1')}
    if cls_from is not None and cls_from != len(inside):
        return (
            f'have the class token behind the {len(inside)} blocks with DTN, but the target takes it before block '
            f'{cls_from}: leave cls_from out.'
        )
    return _check_settings(backbone)


def from_dtn_vit_with_layernorm(state: State) -> State:
    if not is_of_dtns_authors(state):
        raise ValueError("blocks.0.attn.qkv.bias or a class position in pos_embed, which the DTN authors' ViT has not.")
    return from_timm_vit(state)


def _heads_of_vit(attention: str, state: State) -> tuple[int, ...] | None:
    """By the width. T and T*, and B and B*, have tensors of the same shapes."""
    return {192: (3, 4), 384: (6,), 432: (9,), 768: (12, 16)}.get(state[f'{attention}.q.weight'].shape[0])


def _heads_of_pvt(attention: str, state: State) -> int:
    return (4, 4, 5, 8)[int(attention.split('.')[1])]


def _note_of_vit(state: State) -> str:
    heads = _heads_of_vit('blocks.0.attn', state) or ()
    of_heads = f'heads ({" or ".join(map(str, heads))}) and ' if len(heads) > 1 else ''
    return (
        f'{of_heads}norms are those of the target, as the tensors do not tell them: files with layer, insnorm and '
        'gnorm look the same'
    )


def _format(
    backbone: str,
    convert: Callable[[State], State],
    mark: str,
    eps: Eps,
    settings: Callable[[State], dict[str, Any]],
    check: Callable[[nn.Module], str],
) -> Format:
    return Format(
        backbone,
        (mark, r'.*\.var_norm_weight$'),
        convert,
        dropped={
            r'.*\.pos_proj\.bias$': 'the softmax over neighbours cancels it',
            r'.*\.rel_indices$': 'computed from the grid of each input',
        },
        heads=_heads,
        eps=eps,
        settings=settings,
        check=check,
        norm_cfg=NORM_CFG,
        out_type='cls_token',
    )


FORMATS = {
    'dtn-vit-ln': Format(
        'ViTDTN',
        (r'patch_embed\.proj', r'blocks\.0\.attn\.qkv', 'cls_token', 'pos_embed'),
        from_dtn_vit_with_layernorm,
        misses=(r'.*norm_weight$', r'blocks\.0\.attn\.qkv\.bias'),
        heads=_heads_of_vit,
        eps=lambda norm, state: 1e-5,
        settings=lambda state: dict(cls_from=CLS_FROM, **LN_1E_5),
        check=_check_class_token,
        note=_note_of_vit,
        in_auto=is_of_dtns_authors,
        norm_cfg=LN_1E_5['other_norm_cfg'],
        out_type='cls_token',
    ),
    'dtn-pvt-ln': Format(
        'PVTDTN',
        (r'patch_embed1\.', r'block1\.', 'pos_embed1'),
        from_pvt,
        misses=(r'.*norm_weight$',),
        heads=_heads_of_pvt,
        eps=published_eps,
        in_auto=lambda state: False,
        out_type='cls_token',
    ),
    'dtn-pvt': _format('PVTDTN', from_dtn_pvt, r'patch_embed1\.', _eps_of_pvt, lambda state: {}, _check_settings),
    'dtn-vit': _format(
        'ViTDTN', from_dtn_vit, r'patch_embed\.proj', lambda norm, state: 1e-5, lambda state: LN_1E_5, _check_vit
    ),
}
