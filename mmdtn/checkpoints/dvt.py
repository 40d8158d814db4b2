"""Formats of Dynamic Vision Transformer checkpoints, with translation in both directions."""

import re

import torch
from torch import nn

from .format import Format, State
from .t2t import is_sines

PREFIXES = ('less_less_token', 'less_token', 'normal_token')  # 7 x 7, 10 x 10, 14 x 14 tokens
# Each pair gives a module's name in this package and in the authors' code, which spells "reuse" as "resuse".
NAMES = [
    ('stem.proj.', 'patch_embed.proj.'),
    ('stem.project.', 'tokens_to_token.project.'),
    ('relations.conv1.', 'relation_reuse_conv.0.'),
    ('relations.conv2.', 'relation_reuse_conv.2.'),
    ('.features.norm.', '.feature_resuse_mlp.0.'),
    ('.features.mlp.', '.feature_resuse_mlp.1.'),
]
for layer in ('attention1.', 'attention2.'):
    same = [(name, name) for name in ('proj.', 'norm1.', 'norm2.')]
    for ours, theirs in [('features', 'w'), ('qkv.', 'kqv.'), ('fc1.', 'mlp.0.'), ('fc2.', 'mlp.2.'), *same]:
        NAMES.append((f'stem.{layer}{ours}', f'tokens_to_token.{layer}{theirs}'))
PART = re.compile(
    r'cls_token|pos_embed|(norm|head|tokens_to_token\.project|patch_embed\.proj)\.(weight|bias)|'
    r'tokens_to_token\.attention[12]\.(w|(kqv|proj|norm[12]|mlp\.[02])\.(weight|bias))|'
    r'blocks\.\d+\.(norm[12]|attn\.(qkv|proj)|mlp\.fc[12]|feature_resuse_mlp\.(0|1\.fc[12]))\.(weight|bias)|'
    r'relation_reuse_conv\.[02]\.(weight|bias)'
)


def from_dvt(state: State) -> State:
    """Translates the authors' cascade.

    Exits with T2T-ViT contain a table of sines for the positions. The table is checked and then dropped, because the
    model computes the same table.
    """
    present = [prefix for prefix in PREFIXES if any(key.startswith(f'{prefix}.') for key in state)]
    computed = any('.tokens_to_token.' in key for key in state)
    out: State = {}
    for key, value in state.items():
        prefix, _, part = key.partition('.')
        if prefix not in present or not PART.fullmatch(part):
            raise ValueError(f'{key} is not a key of a published DVT.')
        if part == 'pos_embed' and computed:
            if not is_sines(value):
                raise ValueError(f'{key} is not the table of sines of T2T-ViT. Other positions are not supported.')
            continue
        if '.kqv.' in part:
            k, q, v = value.chunk(3)
            value = torch.cat((q, k, v))
        for ours, theirs in NAMES:
            part = part.replace(theirs, ours)
        out[f'exits.{present.index(prefix)}.{part}'] = value
    return out


def to_dvt(model: nn.Module) -> State:
    """Renames the weights of a cascade to the authors' names. This function is the inverse of :func:`from_dvt`."""
    state = model.state_dict()
    exits = list(model.get_submodule('exits').children())
    state |= {f'exits.{i}.pos_embed': exit.get_buffer('pos_embed') for i, exit in enumerate(exits) if _computes(exit)}
    prefixes = {1: PREFIXES[2:], 2: PREFIXES[::2], 3: PREFIXES}.get(len(exits))
    if prefixes is None:
        raise ValueError(f'The published format has one, two or three exits, but the model has {len(exits)}.')
    out: State = {}
    for key, value in state.items():
        _, number, part = key.split('.', 2)
        for ours, theirs in NAMES:
            part = part.replace(ours, theirs)
        if not PART.fullmatch(part):
            raise ValueError(f'The published format has no entry for {key}. It only supports models with LayerNorm.')
        if '.kqv.' in part:
            q, k, v = value.chunk(3)
            value = torch.cat((k, q, v))
        out[f'{prefixes[int(number)]}.{part}'] = value.detach()
    return out


def _computes(exit: nn.Module) -> bool:
    """Returns whether an exit computes its position table. Published files contain the table even if it is computed."""
    return 'pos_embed' in dict(exit.named_buffers(recurse=False))


def _heads(attention: str, state: State) -> int | None:
    """Determines the number of heads from the channels of relation reuse.

    Without relation reuse, models with a published width have 64 channels per head. The result is None for other
    widths.
    """
    relations = state.get('exits.1.relations.conv2.bias')
    if relations is not None:
        return len(relations) // len([key for key in state if re.match(r'exits\.0\.blocks\.\d+\.norm1\.weight', key)])
    width = state[f'{attention}.proj.weight'].shape[0]
    return width // 64 if width in (256, 384) else None


FORMATS = {
    'dvt': Format('DVT', (r'(less_less|less|normal)_token\.blocks\.0\.',), from_dvt, heads=_heads),
    'mmdtn-dvt': Format('DVT', (r'exits\.0\.blocks\.0\.',)),
}
