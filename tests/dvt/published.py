"""Names and shapes of the weights in published DVT files, and random weights that depend on the names only."""

import hashlib
import math
from typing import NamedTuple

import torch

from mmdtn.backbones.t2t import sines

PREFIXES = ('less_less_token', 'less_token', 'normal_token')
GRIDS = (7, 10, 14)
KERNELS = dict(t2t=(14, 11, 7), deit=(32, 23, 16))


class Model(NamedTuple):
    family: str
    width: int
    depth: int
    heads: int
    hidden: int


MODELS = {
    't2t-12': Model('t2t', 256, 12, 4, 512),
    't2t-14': Model('t2t', 384, 14, 6, 1152),
    'deit-s': Model('deit', 384, 12, 6, 1536),
}
REUSES = dict(none=(False, False), feature=(True, False), relation=(False, True), both=(True, True))


def shapes(model: Model, features: bool = True, relations: bool = True, classes: int = 1000) -> dict[str, tuple]:
    """Returns the shape of every tensor in the file by its key."""
    family, width, depth, heads, hidden = model
    out: dict[str, tuple] = {}

    def layer(key: str, *shape: int, bias: bool = True) -> None:
        out[f'{key}.weight'] = shape
        if bias:
            out[f'{key}.bias'] = shape[:1]

    for prefix, grid, kernel in zip(PREFIXES, GRIDS, KERNELS[family], strict=True):
        later = prefix != PREFIXES[0]
        joined = width + 48 * (later and features)
        out[f'{prefix}.cls_token'] = (1, 1, width)
        out[f'{prefix}.pos_embed'] = (1, grid * grid + 1, width)
        if family == 't2t':
            for number, taken in ((1, 3 * kernel * kernel), (2, 576)):
                attention = f'{prefix}.tokens_to_token.attention{number}'
                out[f'{attention}.w'] = (32, 64)
                layer(f'{attention}.kqv', 192, taken)
                layer(f'{attention}.proj', 64, 64)
                layer(f'{attention}.norm1', taken)
                layer(f'{attention}.norm2', 64)
                layer(f'{attention}.mlp.0', 64, 64)
                layer(f'{attention}.mlp.2', 64, 64)
            layer(f'{prefix}.tokens_to_token.project', width, 576)
        else:
            layer(f'{prefix}.patch_embed.proj', width, 3, kernel, kernel)
        for i in range(depth):
            block = f'{prefix}.blocks.{i}'
            layer(f'{block}.norm1', width)
            layer(f'{block}.attn.qkv', 3 * width, width, bias=family == 'deit')
            layer(f'{block}.attn.proj', width, width)
            layer(f'{block}.norm2', joined)
            layer(f'{block}.mlp.fc1', hidden, joined)
            layer(f'{block}.mlp.fc2', width, hidden)
            if later and features:
                layer(f'{block}.feature_resuse_mlp.0', width)
                layer(f'{block}.feature_resuse_mlp.1.fc1', 128, width)
                layer(f'{block}.feature_resuse_mlp.1.fc2', 48, 128)
        if later and relations:
            channels = depth * heads
            layer(f'{prefix}.relation_reuse_conv.0', 3 * channels, channels, 1, 1)
            layer(f'{prefix}.relation_reuse_conv.2', channels, 3 * channels, 1, 1)
        layer(f'{prefix}.norm', width)
        layer(f'{prefix}.head', classes, width)
    return out


def weights(model: Model, features: bool = True, relations: bool = True) -> dict[str, torch.Tensor]:
    """Returns a state dict in which each tensor depends on its key and shape only, and no tensor is constant."""
    return {key: tensor(key, shape, model.family) for key, shape in shapes(model, features, relations).items()}


def tensor(key: str, shape: tuple, family: str) -> torch.Tensor:
    if key.endswith('.pos_embed') and family == 't2t':
        return sines(*shape[1:])[None]
    seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], 'little')
    r = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    if key.endswith(('.cls_token', '.pos_embed', '.bias')):
        return 0.1 * r
    if len(shape) == 1:
        return 1 + 0.1 * r
    if key.endswith('.w'):
        return 0.7 * r
    return (0.5 if key.endswith('.kqv.weight') else 1.0) * r / math.sqrt(r[0].numel())


def images() -> torch.Tensor:
    return torch.randn(2, 3, 224, 224, generator=torch.Generator().manual_seed(0))
