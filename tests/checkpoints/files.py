"""Files as the code of the papers writes them, with random weights, and the arithmetic that belongs to each."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

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


def _timm_vit(name: str, width: int, heads: int) -> Case:
    compute = partial(arithmetic.vit, heads=heads, eps=1e-6)
    return Case(f'DeiT-{name}', partial(vit, width, bias=True), compute, (name,))


CASES = [
    *(_authors_vit(*size) for size in (('t*', 192, 4), ('s', 384, 6), ('s*', 432, 9), ('b', 768, 12), ('b*', 768, 16))),
    *(_timm_vit(*size) for size in (('t', 192, 3), ('s', 384, 6))),
    Case('PVT-tiny', pvt, partial(arithmetic.pvt, heads=(1, 2, 5, 8)), ('tiny',)),
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
