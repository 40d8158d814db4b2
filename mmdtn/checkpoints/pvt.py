"""Formats of PVT checkpoints. The translation depends only on keys and shapes."""

import re

from .format import Format, State


def from_mmdet_pvt(state: State) -> State:
    """Translates MMDetection's ``PyramidVisionTransformer``. The position embeddings must be square."""
    out: State = {}
    for key, value in state.items():
        match = re.fullmatch(r'layers\.(\d)\.(\d)\.(.+)', key)
        if match is None:
            raise ValueError(f"{key} is not a key of MMDetection's PyramidVisionTransformer.")
        stage, part, rest = match[1], match[2], match[3]
        if part == '0':
            out[f'stages.{stage}.patch_embed.' + rest.replace('projection', 'proj')] = value
        elif part == '2':
            out[f'stages.{stage}.norm.{rest}'] = value
        elif rest == '0.pos_embed':
            side = int(value.shape[1] ** 0.5)
            out[f'stages.{stage}.pos_embed'] = value.reshape(1, side, side, -1)
        else:
            index, name = rest.split('.', 1)
            has_position = f'layers.{stage}.1.0.pos_embed' in state
            block = f'stages.{stage}.blocks.{int(index) - has_position}.'
            C = value.shape[0] // 3
            if name.startswith('attn.attn.in_proj_'):
                kind = name.rpartition('_')[2]
                out[block + f'attn.q.{kind}'], out[block + f'attn.kv.{kind}'] = value[:C], value[C:]
            elif name.startswith('attn.attn.out_proj'):
                out[block + name.replace('attn.attn.out_proj', 'attn.proj')] = value
            elif name.startswith('ffn.layers.'):
                _, _, number, kind = name.split('.')
                layer = {'0': 'fc1', '1': 'dwconv'}.get(number, 'fc2')  # only PVTv2 has the depthwise convolution
                linear = value.dim() == 4 and layer != 'dwconv'  # MMDetection uses 1 x 1 convolutions
                out[block + f'mlp.{layer}.{kind}'] = value.flatten(1) if linear else value
            else:
                out[block + name] = value
    return out


def from_timm_pvt_v2(state: State) -> State:
    """Translates timm's ``pvt_v2_*``. Block parameters have the same names in timm and in this package."""
    out: State = {}
    for key, value in state.items():
        if not key.startswith(('patch_embed.', 'stages.')):
            raise ValueError(f"{key} is not a key of timm's PVTv2.")
        key = re.sub(r'^patch_embed\.', 'stages.0.patch_embed.', key)
        out[key.replace('.downsample.', '.patch_embed.')] = value
    return out


def from_pvt(state: State) -> State:
    """Translates the classifiers of whai362/PVT, versions 1 and 2.

    The position embeddings must be square. The embedding of the last stage starts with the class token's position.
    """
    out: State = {}
    for key, value in state.items():
        match = re.fullmatch(r'(patch_embed|pos_embed|block|norm)([1-4])(\.(.+))?', key)
        if match is None:
            if key not in ('cls_token', 'norm.weight', 'norm.bias'):
                raise ValueError(f'{key} is not a key of whai362/PVT.')
            out[key] = value[:, None] if key == 'cls_token' else value
            continue
        part, stage, rest = match[1], f'stages.{int(match[2]) - 1}.', match[4]
        if part == 'pos_embed':
            if match[2] == '4':
                out['cls_pos'] = value[:, None, :1]
                value = value[:, 1:]
            side = int(value.shape[1] ** 0.5)
            out[stage + 'pos_embed'] = value.reshape(1, side, side, -1)
        elif part == 'block':
            out[f'{stage}blocks.' + rest.replace('.dwconv.dwconv.', '.dwconv.')] = value
        else:
            out[f'{stage}{part}.{rest}'] = value
    return out


def published_heads(attention: str, state: State) -> int:
    """Returns an attention layer's number of heads in published PVTs, which the tensors do not determine."""
    return (1, 2, 5, 8)[int(attention.split('.')[1])]


def published_eps(norm: str, state: State) -> float:
    """Returns the eps of a norm in whai362/PVT and timm: torch's default after convolutions, 1e-6 elsewhere."""
    return 1e-5 if norm.endswith(('patch_embed.norm', 'attn.norm')) else 1e-6


def _own_heads(attention: str, state: State) -> int | None:
    """Returns the published number of heads for models with LayerNorm and published widths, and None otherwise.

    For other files of this package, only the config determines the number of heads.
    """
    stage, width = int(attention.split('.')[1]), state[f'{attention}.q.weight'].shape[0]
    published = width in ((32, 64), (64, 128), (160, 320), (256, 512))[stage]
    with_dtn = any(key.endswith('.var_mix') for key in state)
    return published_heads(attention, state) if published and not with_dtn else None


def _note(state: State) -> str:
    if 'stages.0.pos_embed' not in state:  # version 2
        return ''
    return (
        "the stages have 1, 2, 5, 8 heads, as in whai362/PVT. The DTN authors' PVT with LayerNorm has the same "
        "tensors, but 4, 4, 5, 8 heads. For a file of these authors, use --from dtn, or source='dtn' in init_cfg"
    )


FORMATS = {
    'pvt': Format(
        'PVTDTN',
        (r'patch_embed1\.', r'block1\.'),
        from_pvt,
        misses=(r'.*(norm_weight|\.scale|\.running_(var|phi))$',),  # of the DTN authors' normalisers
        heads=published_heads,
        eps=published_eps,
        note=_note,
        out_type='cls_token',
    ),
    'mmdet-pvt': Format(
        'PVTDTN',
        (r'layers\.0\.0\.projection', r'layers\.0\.1\.'),
        from_mmdet_pvt,
        heads=published_heads,
        eps=lambda norm, state: 1e-6,
        settings=lambda state: dict(other_norm_cfg=dict(type='LN', eps=1e-6)),
        out_type='featmap',
    ),
    'timm-pvt': Format(
        'PVTDTN',
        (r'patch_embed\.proj', r'stages\.0\.blocks\.0\.attn\.kv'),
        from_timm_pvt_v2,
        heads=published_heads,
        eps=published_eps,
        out_type='cls_token',
    ),
    'mmdtn-pvt': Format('PVTDTN', (r'stages\.0\.patch_embed\.proj',), heads=_own_heads),
}
