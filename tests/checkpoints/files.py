"""Files as the code of the papers writes them, with random weights, and the arithmetic that belongs to each."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import arithmetic
from .arithmetic import Norm, State
from .published import AuthorsDTN

WIDTHS = (64, 128, 320, 512)


@dataclass
class Case:
    name: str
    state: Callable[[], State]
    compute: Callable[[Tensor, State], Tensor]
    to: tuple[str, ...]  # --to and what follows
    says: tuple[str, ...] = ()  # what the command has to print
    side: int = 224


class Weights(dict):
    """Collects random tensors. Norms have factors near 1; tokens and positions are short numbers, exact when added."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)

    def random(self, *shape: int, std: float = 1.0) -> Tensor:
        return torch.randn(shape, generator=self.generator) * std

    def layer(self, name: str, out: int, *inputs: int, bias: bool = True) -> None:
        self[f'{name}.weight'] = self.random(out, *inputs, std=torch.tensor(inputs).prod().item() ** -0.5)
        if bias:
            self[f'{name}.bias'] = self.random(out, std=0.1)

    def norm(self, name: str, channels: int) -> None:
        self[f'{name}.weight'] = 1 + self.random(channels, std=0.1)
        self[f'{name}.bias'] = self.random(channels, std=0.1)

    def position(self, name: str, *shape: int) -> None:
        self[name] = (self.random(*shape) * 256).round() / 4096

    def dtn(self, name: str, channels: int, heads: int) -> None:
        self.norm(name, channels)
        for moment in ('mean', 'var'):
            self[f'{name}.{moment}_norm_weight'] = self.random(heads)
        self.layer(f'{name}.pos_proj', heads, 3)

    def block(self, name: str, width: int, ratio: int, bias: bool, heads: int = 0) -> None:
        for norm in ('norm1', 'norm2'):
            self.dtn(f'{name}.{norm}', width, heads) if heads else self.norm(f'{name}.{norm}', width)
        self.layer(f'{name}.attn.qkv', 3 * width, width, bias=bias)
        self.layer(f'{name}.attn.proj', width, width)
        self.layer(f'{name}.mlp.fc1', ratio * width, width)
        self.layer(f'{name}.mlp.fc2', width, ratio * width)


def vit(width: int, bias: bool = False, of_dtn: int = 0, class_position: bool | None = None, depth: int = 12) -> State:
    """timm's names. The DTN authors' have no bias in qkv and no position of the class token."""
    state = Weights()
    state.layer('patch_embed.proj', width, 3, 16, 16)
    state.position('cls_token', 1, 1, width)
    state.position('pos_embed', 1, 196 + (bias if class_position is None else class_position), width)
    for i in range(depth):
        state.block(f'blocks.{i}', width, 4, bias, heads=of_dtn if i < 10 else 0)
    state.norm('norm', width)
    state.layer('head', 10, width)
    return dict(state)


def pvt(depths: Sequence[int] = (2, 2, 2, 2), of_dtn: Sequence[int] = (0, 0, 0)) -> State:
    """The names of whai362/PVT, version 1."""
    state = Weights()
    channels = 3
    for i, (width, depth, ratio) in enumerate(zip(WIDTHS, depths, (8, 4, 2, 1), strict=True), 1):
        patch = 4 if i == 1 else 2
        state.layer(f'patch_embed{i}.proj', width, channels, patch, patch)
        state.norm(f'patch_embed{i}.norm', width)
        side = 112 // 2**i
        state.position(f'pos_embed{i}', 1, side * side + (i == 4), width)
        for j in range(depth):
            name, heads = f'block{i}.{j}', (*of_dtn, 0)[i - 1]
            for norm in ('norm1', 'norm2'):
                state.dtn(f'{name}.{norm}', width, heads) if heads else state.norm(f'{name}.{norm}', width)
            for part, size in (('q', 1), ('kv', 2), ('proj', 1)):
                state.layer(f'{name}.attn.{part}', size * width, width)
            if ratio > 1:
                state.layer(f'{name}.attn.sr', width, width, ratio, ratio)
                state.norm(f'{name}.attn.norm', width)
            wide = width * (8, 8, 4, 4)[i - 1]
            state.layer(f'{name}.mlp.fc1', wide, width)
            state.layer(f'{name}.mlp.fc2', width, wide)
        channels = width
    state.position('cls_token', 1, 1, 512)
    state.norm('norm', 512)
    state.layer('head', 10, 512)
    return dict(state)


def sines(positions: int, channels: int) -> Tensor:
    """T2T-ViT's own table, computed in double precision and kept in single."""
    j = np.arange(channels)
    angles = np.arange(positions)[:, None] / np.power(10000, 2 * (j // 2) / channels)
    angles[:, 0::2], angles[:, 1::2] = np.sin(angles[:, 0::2]), np.cos(angles[:, 1::2])
    return torch.tensor(angles, dtype=torch.float32)[None]


def resized(table: Tensor, side: int) -> Tensor:
    """As T2T-ViT's code resizes it for fine-tuning: bilinear, without the class token's row."""
    before = round((table.shape[1] - 1) ** 0.5)
    grid = table[:, 1:].transpose(1, 2).unflatten(2, (before, before))
    grid = F.interpolate(grid, (side, side), mode='bilinear').flatten(2).transpose(1, 2)
    return torch.cat((table[:, :1], grid), 1)


def t2t(width: int = 256, depth: int = 7, ratio: int = 2, performer: bool = True, table: Tensor | None = None) -> State:
    """The names of T2T-ViT's authors."""
    state = Weights()
    state.position('cls_token', 1, 1, width)
    state['pos_embed'] = sines(197, width) if table is None else table
    for i, inputs in ((1, 147), (2, 576)):
        name = f'tokens_to_token.attention{i}'
        state.norm(f'{name}.norm1', inputs)
        state.norm(f'{name}.norm2', 64)
        if performer:
            state[f'{name}.w'] = nn.init.orthogonal_(torch.empty(32, 64)) * 32**0.5
            state.layer(f'{name}.kqv', 192, inputs)
            state.layer(f'{name}.proj', 64, 64)
        else:
            state.layer(f'{name}.attn.qkv', 192, inputs, bias=False)
            state.layer(f'{name}.attn.proj', 64, 64)
        for theirs in ('mlp.0', 'mlp.2') if performer else ('mlp.fc1', 'mlp.fc2'):
            state.layer(f'{name}.{theirs}', 64, 64)
    state.layer('tokens_to_token.project', width, 576)
    for i in range(depth):
        state.block(f'blocks.{i}', width, ratio, bias=False)
    state.norm('norm', width)
    state.layer('head', 10, width)
    return dict(state)


def authors_norm(heads: int, side: int = 14, pool: int = 1) -> Norm:
    """The dense DTN of the authors, with the tensors of one layer."""

    def norm(x: Tensor, state: State, name: str) -> Tensor:
        layer = AuthorsDTN(x.shape[-1], heads, side, pool).double()
        layer.shift = layer.shift.double()
        own = {key.removeprefix(f'{name}.'): value for key, value in state.items() if key.startswith(f'{name}.')}
        layer.load_state_dict(own)
        return layer(x)

    return norm


def dtn_of_stage(stage: int) -> Norm:
    return authors_norm((4, 4, 5)[stage - 1], 112 // 2**stage, (4, 2, 1)[stage - 1])


def _authors_vit(name: str, width: int, heads: int) -> Case:
    compute = partial(arithmetic.vit, heads=heads, eps=1e-5, cls_from=10, dtn=authors_norm(heads))
    says = ("'other_norm_cfg': {'type': 'LN', 'eps': 1e-05}",)
    return Case(f'DTN ViT-{name}', partial(vit, width, of_dtn=heads), compute, (name, '--from', 'dtn'), says)


def _layer_vit(name: str, width: int, heads: int) -> Case:
    compute = partial(arithmetic.vit, heads=heads, eps=1e-5, cls_from=10)
    says = ('dtn-vit-ln', "'cls_from': 10", 'gnorm')
    return Case(f'DTN authors ViT-{name}, LN', partial(vit, width), compute, (name,), says)


def _timm_vit(name: str, width: int, heads: int) -> Case:
    compute = partial(arithmetic.vit, heads=heads, eps=1e-6)
    return Case(f'DeiT-{name}', partial(vit, width, bias=True), compute, (name,))


def _t2t(name: str, width: int, depth: int, heads: int, ratio: int = 3, **others: Any) -> Case:
    state = partial(t2t, width, depth, ratio, performer=not name.startswith('t-'), **others)
    return Case(f'T2T-ViT-{name}', state, partial(arithmetic.t2t, heads=heads, depth=depth), (name,))


def _t2t_with_other_positions(name: str, table: Tensor, side: int, *says: str) -> Case:
    compute = partial(arithmetic.t2t, heads=4, depth=7)
    return Case(f'T2T-ViT-7, {name}', partial(t2t, table=table), compute, ('7',), says, side)


CASES = [
    *(_t2t('7', 256, 7, 4, ratio=2), _t2t('10', 256, 10, 4, ratio=2), _t2t('12', 256, 12, 4, ratio=2)),
    *(_t2t('14', 384, 14, 6), _t2t('14-resnext', 384, 14, 32), _t2t('14-wide', 768, 4, 12)),
    *(_t2t('19', 448, 19, 7), _t2t('24', 512, 24, 8), _t2t('t-14', 384, 14, 6)),
    _t2t_with_other_positions('sines at 288 px', sines(325, 256), 288, "'img_size': 288"),
    _t2t_with_other_positions('resized to 288 px', resized(sines(197, 256), 18), 288, "'learned_positions': True"),
    _t2t_with_other_positions(
        'learned positions',
        (torch.randn(1, 197, 256, generator=torch.Generator().manual_seed(2)) * 256).round() / 4096,
        224,
        "'learned_positions': True",
    ),
    *(_authors_vit(*size) for size in (('t*', 192, 4), ('s', 384, 6), ('s*', 432, 9), ('b', 768, 12), ('b*', 768, 16))),
    *(_layer_vit(*size) for size in (('t', 192, 3), ('t*', 192, 4), ('s', 384, 6), ('s*', 432, 9), ('b*', 768, 16))),
    *(_timm_vit(*size) for size in (('t', 192, 3), ('s', 384, 6))),
    Case('PVT-tiny', pvt, partial(arithmetic.pvt, heads=(1, 2, 5, 8)), ('tiny',), ('--from dtn',)),
    Case(
        'DTN authors PVT-tiny, LN',
        pvt,
        partial(arithmetic.pvt, heads=(4, 4, 5, 8)),
        ('tiny', '--from', 'dtn'),
        ("'num_heads': (4, 4, 5, 8)",),
    ),
    Case(
        'PVT-small',
        partial(pvt, (3, 4, 6, 3)),
        partial(arithmetic.pvt, heads=(1, 2, 5, 8), depths=(3, 4, 6, 3)),
        ('small',),
    ),
    Case(
        'DTN PVT-tiny',
        partial(pvt, of_dtn=(4, 4, 5)),
        partial(arithmetic.pvt, heads=(4, 4, 5, 8), dtn=dtn_of_stage),
        ('tiny',),
    ),
]
