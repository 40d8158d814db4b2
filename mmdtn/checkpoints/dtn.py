"""Formats of checkpoints from the DTN authors' code, which trains PVT and ViT with nine normalisers."""

import math
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .format import Format, State
from .pvt import from_pvt, published_eps
from .vit import check_class_token, from_timm_vit, is_of_dtns_authors

NORM_CFG = dict(type='DTN', unbiased=True, pool_second_moment=False)
CLS_FROM = 10  # in the authors' code, the class token joins before this block by default
LN_1E_5: dict[str, Any] = dict(type='LN', eps=1e-5)  # eps is torch's default; timm's ViT uses 1e-6
# The keys are the authors' names. Every norm has eps=1e-5, except 'layer' in PVT, which has eps=1e-6.
NORMS: dict[str, dict[str, Any]] = {
    'layer': dict(type='LN'),
    'insnorm': dict(type='IN', unbiased=True),
    'gnorm': dict(type='GN'),
    'scale': dict(type='ScaleNorm'),
    'batch': dict(type='BN'),
    'power': dict(type='PowerNorm', warmup_iters=3000),
    'dtn': NORM_CFG,
    'dtn_pool': NORM_CFG,
    'dtn_var': NORM_CFG | dict(mean_lambda=1.0),
}
# These norms cannot be distinguished by their tensors, because each has one weight and one bias. The keys are the
# values of --norm.
CHOICES_OF_VIT = {'LN': LN_1E_5, 'IN': NORMS['insnorm'], 'GN': NORMS['gnorm']}
CHOICES_OF_PVT = CHOICES_OF_VIT | {'LN': NORMS['layer']}
TOLD = r'.*\.norm[12]\.(var_norm_weight|scale|bn\.running_var|running_phi)$'
RENAMED = {'mean_norm_weight': 'mean_mix', 'var_norm_weight': 'var_mix', 'scale': 'weight'}
RENAMED |= {'running_phi': 'phi', 'ema_gz': 'nu', 'iters': 'count'}  # buffers of PowerNorm
DROPPED = {
    r'.*\.pos_proj\.bias$': 'the softmax over neighbours cancels this bias',
    r'.*\.rel_indices$': 'computed from the size of each input',
}


def from_dtn_pvt(state: State) -> State:
    return _rename_norms(from_pvt(state))


def from_dtn_vit(state: State) -> State:
    return _rename_norms(from_timm_vit(state))


def from_dtn_vit_with_layernorm(state: State) -> State:
    if not is_of_dtns_authors(state):
        raise ValueError(
            'The file has blocks.0.attn.qkv.bias, or a class position in pos_embed. The ViT of the DTN authors has '
            'neither, so the file has another format. Leave out --from, or source in init_cfg.'
        )
    return from_timm_vit(state)


def from_dtn_plain_vit(state: State) -> State:
    """Translates the authors' other ViT.

    In this ViT, the class token joins before the first block, and the normaliser before MLPs is always LayerNorm.
    """
    if other := [key for key in state if re.search(r'\.norm\.(scale|bn\.running_var|running_phi)$', key)]:
        raise ValueError(
            f'{other[0]}: this model uses LayerNorm before MLPs, but another normaliser before attention. ViTDTN uses '
            'the same normaliser in both places, so it cannot compute the same as this model.'
        )
    out: State = {}
    for key, value in state.items():
        for theirs, timms in {
            r'^to_patch_embedding\.1\.': 'patch_embed.proj.',
            r'^pos_embedding$': 'pos_embed',
            r'^transformer\.layers\.': 'blocks.',
            r'^mlp_head\.0\.': 'norm.',
            r'\.0\.norm\.': '.norm1.',
            r'\.1\.norm\.': '.norm2.',
            r'\.0\.fn\.to_qkv\.': '.attn.qkv.',
            r'\.0\.fn\.to_out\.0\.': '.attn.proj.',
            r'\.1\.fn\.net\.0\.': '.mlp.fc1.',
            r'\.1\.fn\.net\.3\.': '.mlp.fc2.',
        }.items():
            key = re.sub(theirs, timms, key)
        if key == 'patch_embed.proj.weight':  # comes from a linear layer on flattened patches with channels last
            side = math.isqrt(value.shape[1] // 3)
            value = value.unflatten(1, (side, side, -1)).permute(0, 3, 1, 2)
        out[key] = value
    return from_timm_vit(out)


def _rename_norms(state: State) -> State:
    """Renames the parameters and buffers of norms.

    The authors' DTN layers project (dx, dy, dx^2 + dy^2) to scores. In these layers, the offset (dx, dy) points from
    key to query. In this package, the offset points from query to key, so the signs of dx and dy are flipped.
    """
    out: State = {}
    for key, value in state.items():
        norm, _, part = key.rpartition('.')
        if key.endswith('.pos_proj.weight'):
            dx, dy, square = value.unbind(1)
            key, value = key.replace('.pos_proj.weight', '.position'), torch.stack((square, -dx, -dy), 1)
        elif re.search(r'\.norm[12]$', norm):
            if f'{norm}.bn.running_var' in state:
                key = f'{norm}.bn.{part}'
            elif part in RENAMED:
                key, value = f'{norm}.{RENAMED[part]}', _without_ones(value, part)
        out[key] = value
    return out


def _without_ones(value: Tensor, part: str) -> Tensor:
    """Removes dimensions of size 1 from the tensors of the authors' PowerNorm."""
    return value.reshape(()) if part == 'iters' else value.flatten() if value.dim() == 4 else value


def norm_type(norm: str, state: State) -> str:
    """Returns the authors' name of a norm, determined from its translated tensors.

    All norms with the same tensors as LayerNorm are called ``'layer'``.
    """
    for part, theirs in {'mean_mix': 'dtn', 'var_mix': 'dtn_var', 'bn.weight': 'batch', 'phi': 'power'}.items():
        if f'{norm}.{part}' in state:
            return theirs
    return 'layer' if f'{norm}.bias' in state else 'scale'


def _norm_cfgs(norm: str, state: State, alike: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
    kind = norm_type(norm, state)
    if kind == 'layer':
        return alike
    told = {name: value for name, value in NORMS[kind].items() if name != 'warmup_iters'}  # affects training only
    defaults = dict(prenorm=True, mean_lambda=None) if told['type'] == 'DTN' else {}
    return [dict(defaults | told, eps=1e-5)]


def _norms_of_vit(norm: str, state: State) -> Sequence[dict[str, Any]]:
    told = norm_type('blocks.0.norm1', state) != 'layer' or not norm.startswith('blocks.')
    alike = [dict(choice, eps=1e-5) for choice in CHOICES_OF_VIT.values()]
    return _norm_cfgs(norm, state, alike[:1] if told else alike)


def _norms_of_pvt(norm: str, state: State) -> Sequence[dict[str, Any]]:
    if not re.search(r'norm[12]$', norm):
        return [dict(type='LN', eps=published_eps(norm, state))]
    told = norm_type('stages.0.blocks.0.norm1', state) != 'layer' or norm.startswith('stages.3.')
    alike = [dict(type='LN', eps=1e-6), *(dict(NORMS[name], eps=1e-5) for name in ('insnorm', 'gnorm'))]
    return _norm_cfgs(norm, state, alike[:1] if told else alike)


def _settings_of_vit(state: State) -> dict[str, Any]:
    ours = from_dtn_vit(state)
    norms = [key.removesuffix('.attn.q.weight') + '.norm1' for key in ours if key.endswith('.attn.q.weight')]
    kinds = [norm_type(norm, ours) for norm in norms]
    inside = len([kind for kind in kinds if kind != 'layer'])
    settings: dict[str, Any] = dict(dtn_layers=inside) if inside not in (0, CLS_FROM) else {}
    if kinds[0] != 'layer':
        settings |= dict(norm_cfg=NORMS[kinds[0]])
    return settings | dict(cls_from=inside or CLS_FROM, other_norm_cfg=LN_1E_5)


def _settings_of_pvt(state: State) -> dict[str, Any]:
    return dict(norm_cfg=NORMS[norm_type('stages.0.blocks.0.norm1', from_dtn_pvt(state))])


def _check_class_token(backbone: nn.Module) -> str:
    """Returns an error message if the class token of ``backbone`` joins at the wrong block, and '' otherwise.

    In the authors' ViT, the class token joins after the blocks whose normaliser is not LayerNorm.
    """
    cls_from = getattr(backbone, 'cls_from', None)
    norms = [module for name, module in backbone.named_modules() if name.endswith('norm1')]
    expected = len([norm for norm in norms if not isinstance(norm, nn.LayerNorm)]) or CLS_FROM
    if cls_from in (None, expected):
        return ''
    return (
        f'have the class token from block {expected} on, but in the target it joins before block {cls_from}. With the '
        f'same weights, the target would compute different outputs. Set cls_from={expected}.'
    )


def _heads_of_vit(attention: str, state: State) -> int | tuple[int, ...] | None:
    """Returns the number of heads in an attention layer, or all possible numbers.

    With DTN, the tensors determine this number. Without DTN, the width determines this number, but T and T* have the
    same width, as do B and B*.
    """
    for norm in (attention.removesuffix('attn') + 'norm1', 'blocks.0.norm1'):
        if (own := state.get(f'{norm}.var_mix')) is not None:
            return own.shape[0]
    return {192: (3, 4), 384: (6,), 432: (9,), 768: (12, 16)}.get(state[f'{attention}.q.weight'].shape[0])


def _heads_of_pvt(attention: str, state: State) -> int:
    own = state.get(attention.removesuffix('attn') + 'norm1.var_mix')
    return (4, 4, 5, 8)[int(attention.split('.')[1])] if own is None else own.shape[0]


def _note_of_vit(state: State) -> str:
    heads = _heads_of_vit('blocks.0.attn', state)
    unknown = [f'heads ({" or ".join(map(str, heads))})'] if isinstance(heads, tuple) and len(heads) > 1 else []
    if norm_type('blocks.0.norm1', state) == 'layer':
        return _note_of_norms(state, unknown)
    return f'{unknown[0]} are taken from the target, because the tensors do not determine them' if unknown else ''


def _note_of_norms(state: State, unknown: Sequence[str] = ()) -> str:
    return (
        f'{" and ".join([*unknown, "norms"])} are taken from the target, because the tensors do not determine them: '
        'layer, insnorm and gnorm have the same tensors'
    )


FORMATS = {
    'dtn-vit-ln': Format(
        'ViTDTN',
        (r'patch_embed\.proj', r'blocks\.0\.attn\.qkv', 'cls_token', 'pos_embed'),
        from_dtn_vit_with_layernorm,
        misses=(TOLD,),
        heads=_heads_of_vit,
        eps=lambda norm, state: 1e-5,
        norms=_norms_of_vit,
        choices=CHOICES_OF_VIT,
        settings=_settings_of_vit,
        check=_check_class_token,
        note=_note_of_vit,
        in_auto=is_of_dtns_authors,
        norm_cfg=LN_1E_5,
        out_type='cls_token',
    ),
    'dtn-vit': Format(
        'ViTDTN',
        (r'patch_embed\.proj', r'blocks\.0\.attn\.qkv', 'cls_token', 'pos_embed', TOLD),
        from_dtn_vit,
        dropped=DROPPED,
        heads=_heads_of_vit,
        norms=_norms_of_vit,
        settings=_settings_of_vit,
        check=_check_class_token,
        note=_note_of_vit,
        norm_cfg=NORM_CFG,
        out_type='cls_token',
    ),
    'dtn-plain-vit': Format(
        'ViTDTN',
        (r'to_patch_embedding\.1\.', r'transformer\.layers\.0\.0\.fn\.to_qkv'),
        from_dtn_plain_vit,
        heads=_heads_of_vit,
        eps=lambda norm, state: 1e-5,
        norms=lambda norm, state: [LN_1E_5],
        choices=dict(LN=LN_1E_5),
        check=check_class_token,
        note=_note_of_vit,
        norm_cfg=LN_1E_5,
        out_type='cls_token',
    ),
    'dtn-pvt-ln': Format(
        'PVTDTN',
        (r'patch_embed1\.', r'block1\.', 'pos_embed1'),
        from_pvt,
        misses=(TOLD,),
        heads=_heads_of_pvt,
        eps=published_eps,
        norms=_norms_of_pvt,
        choices=CHOICES_OF_PVT,
        note=_note_of_norms,
        in_auto=lambda state: False,
        out_type='cls_token',
    ),
    'dtn-pvt': Format(
        'PVTDTN',
        (r'patch_embed1\.', TOLD),
        from_dtn_pvt,
        dropped=DROPPED,
        heads=_heads_of_pvt,
        norms=_norms_of_pvt,
        settings=_settings_of_pvt,
        norm_cfg=NORM_CFG,
        out_type='cls_token',
    ),
}
