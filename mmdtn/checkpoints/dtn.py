"""Formats of the DTN authors' published code, which trains PVT and ViT, and their translation."""

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from mmdtn.norms import DTN

from .format import Eps, Format, State
from .pvt import from_pvt, published_eps
from .vit import from_timm_vit

NORM_CFG = dict(type='DTN', unbiased=True, pool_second_moment=False)
LN_1E_5 = dict(other_norm_cfg=dict(type='LN', eps=1e-5))  # torch's default; timm's ViT has 1e-6


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


def _check_settings(backbone: nn.Module) -> str:
    for layer in (m for m in backbone.modules() if isinstance(m, DTN)):
        s = layer.settings
        if not (s.prenorm and s.unbiased and (s.pool_second_moment is False or s.pool_size == 1)):
            return f'need norm_cfg={NORM_CFG}, but the target has DTN({layer.extra_repr()}).'
    return ''


def _eps_of_pvt(norm: str, state: State) -> float:
    return 1e-5 if f'{norm}.var_mix' in state else published_eps(norm, state)


def _format(
    backbone: str,
    convert: Callable[[State], State],
    mark: str,
    eps: Eps,
    settings: Callable[[State], dict[str, Any]],
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
        check=_check_settings,
        norm_cfg=NORM_CFG,
        out_type='cls_token',
    )


FORMATS = {
    'dtn-pvt': _format('PVTDTN', from_dtn_pvt, r'patch_embed1\.', _eps_of_pvt, lambda state: {}),
    'dtn-vit': _format('ViTDTN', from_dtn_vit, r'patch_embed\.proj', lambda norm, state: 1e-5, lambda state: LN_1E_5),
}
