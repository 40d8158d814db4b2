"""State dicts of the DTN authors' published code, which trains PVT and ViT, as ours."""

import re

import torch
from torch import Tensor

from .pvt import from_pvt
from .vit import from_timm_vit

State = dict[str, Tensor]


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
