"""Formats of ViT checkpoints. The translation depends only on keys and shapes."""

import math
import re

from torch import nn

from .format import Format, State


def from_timm_vit(state: State) -> State:
    """Translates timm's ``vit_*`` and ``deit_*`` with a class token.

    The position embedding must be square, and may begin with the class token's position.
    """
    out: State = {}
    for key, value in state.items():
        if not key.startswith(('cls_token', 'pos_embed', 'patch_embed.proj.', 'blocks.', 'norm.')):
            raise ValueError(f"{key} is not a key of timm's ViT.")
        if key == 'pos_embed':
            side = int(value.shape[1] ** 0.5)
            out[key] = value[:, value.shape[1] - side * side :].reshape(1, side, side, -1)
        elif key == 'cls_token':  # adds its position, so that the class token can join before any block
            position = state['pos_embed']
            leads = position.shape[1] != int(position.shape[1] ** 0.5) ** 2
            out[key] = (value.double() + position[:, :1].double() if leads else value)[:, None]
        elif '.attn.qkv.' in key:
            C = value.shape[0] // 3
            out[key.replace('qkv', 'q')], out[key.replace('qkv', 'kv')] = value[:C], value[C:]
        else:
            out[key.replace('patch_embed.proj', 'patch_embed')] = value
    return out


def from_mmpretrain_vit(state: State) -> State:
    """Translates MMPretrain's ``VisionTransformer`` with a class token."""
    out: State = {}
    for key, value in state.items():
        if not key.startswith(('cls_token', 'pos_embed', 'patch_embed.projection.', 'layers.', 'ln1.')):
            raise ValueError(f"{key} is not a key of MMPretrain's VisionTransformer.")
        for theirs, timms in {
            r'^ln1\.': 'norm.',
            r'^patch_embed\.projection\.': 'patch_embed.proj.',
            r'^layers\.': 'blocks.',
            r'\.ln([12])\.': r'.norm\1.',
            r'\.ffn\.layers\.0\.0\.': '.mlp.fc1.',
            r'\.ffn\.layers\.1\.': '.mlp.fc2.',
        }.items():
            key = re.sub(theirs, timms, key)
        out[key] = value
    return from_timm_vit(out)


def is_of_dtns_authors(state: State) -> bool:
    """Returns whether a file with timm's keys and LayerNorm comes from the DTN authors.

    The authors' ViT has no bias in qkv and no position for the class token.
    """
    position = state['pos_embed']
    return 'blocks.0.attn.qkv.bias' not in state and math.isqrt(position.shape[1]) ** 2 == position.shape[1]


def _settings(state: State) -> dict[str, int]:
    """Returns the patch size and the image size if they differ from the defaults, 16 and 224."""
    weight = next(value for key, value in state.items() if re.fullmatch(r'patch_embed\.proj(ection)?\.weight', key))
    patch = weight.shape[-1]
    size = patch * math.isqrt(state['pos_embed'].shape[1])
    return (dict(patch_size=patch) if patch != 16 else {}) | (dict(img_size=size) if size != 224 else {})


def published_heads(attention: str, state: State) -> int:
    return state[f'{attention}.q.weight'].shape[0] // 64  # ViT, DeiT and most T2T-ViTs have 64 channels per head


def check_class_token(backbone: nn.Module) -> str:
    if not getattr(backbone, 'cls_from', None):
        return ''
    return (
        f'have the class token from the first block on, but in the target it joins before block {backbone.cls_from}. '
        'With the same weights, the target would compute different outputs. Set cls_from=0, which every norm_cfg '
        "supports, or out_type='featmap' for a model without a class token."
    )


FORMATS = {
    'timm-vit': Format(
        'ViTDTN',
        (r'patch_embed\.proj', r'blocks\.0\.attn\.qkv', 'cls_token', 'pos_embed'),
        from_timm_vit,
        misses=(r'.*norm_weight$', 'dist_token'),
        in_auto=lambda state: not is_of_dtns_authors(state),
        heads=published_heads,
        eps=lambda norm, state: 1e-6,
        settings=_settings,
        check=check_class_token,
        out_type='cls_token',
    ),
    'mmpretrain-vit': Format(
        'ViTDTN',
        (r'patch_embed\.projection', r'layers\.0\.ln1\.', 'cls_token'),
        from_mmpretrain_vit,
        heads=published_heads,
        eps=lambda norm, state: 1e-6,
        settings=_settings,
        check=check_class_token,
        out_type='cls_token',
    ),
    'mmdtn-vit': Format('ViTDTN', (r'blocks\.0\.attn\.q\.',), misses=(r'patch_embed\.attention1',)),
}
