"""The arithmetic of published models, written from their descriptions, on the tensors of their files.

Each function takes the state dict of a file under the names it was published with. No model of timm, MMDetection or
MMPretrain takes part, and each eps is given here.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

State = dict[str, Tensor]
Norm = Callable[[Tensor, State, str], Tensor]


def layer_norm(eps: float) -> Norm:
    def norm(x: Tensor, state: State, name: str) -> Tensor:
        x = x - x.mean(-1, keepdim=True)
        variance = x.square().mean(-1, keepdim=True)
        return x / (variance + eps).sqrt() * state[f'{name}.weight'] + state[f'{name}.bias']

    return norm


def linear(x: Tensor, state: State, name: str) -> Tensor:
    return F.linear(x, state[f'{name}.weight'], state.get(f'{name}.bias'))


def attend(q: Tensor, k: Tensor, v: Tensor, heads: int) -> Tensor:
    q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in (q, k, v))
    weights = (q @ k.transpose(2, 3) / q.shape[-1] ** 0.5).softmax(-1)
    return (weights @ v).transpose(1, 2).flatten(2)


def mlp(x: Tensor, state: State, name: str) -> Tensor:
    return linear(F.gelu(linear(x, state, f'{name}.fc1')), state, f'{name}.fc2')


def plain_block(x: Tensor, state: State, name: str, heads: int, norm: Norm) -> Tensor:
    q, k, v = linear(norm(x, state, f'{name}.norm1'), state, f'{name}.attn.qkv').chunk(3, -1)
    x = x + linear(attend(q, k, v, heads), state, f'{name}.attn.proj')
    return x + mlp(norm(x, state, f'{name}.norm2'), state, f'{name}.mlp')


def vit(
    images: Tensor, state: State, heads: int, eps: float, cls_from: int = 0, depth: int = 12, dtn: Norm | None = None
) -> Tensor:
    """The features of the class token, which joins before block ``cls_from``; ``dtn`` normalises the blocks before."""
    norm = layer_norm(eps)
    x = F.conv2d(images, state['patch_embed.proj.weight'], state['patch_embed.proj.bias'], stride=16)
    x, position, token = x.flatten(2).transpose(1, 2), state['pos_embed'], state['cls_token']
    if position.shape[1] == x.shape[1] + 1:
        token, position = token + position[:, :1], position[:, 1:]
    x = x + position
    for i in range(depth):
        if i == cls_from:
            x = torch.cat((token.expand(len(x), -1, -1), x), 1)
        x = plain_block(x, state, f'blocks.{i}', heads, dtn if dtn and i < cls_from else norm)
    return norm(x, state, 'norm')[:, 0]


def pvt(
    images: Tensor,
    state: State,
    heads: Sequence[int],
    depths: Sequence[int] = (2, 2, 2, 2),
    dtn: Callable[[int], Norm] | None = None,
) -> Tensor:
    """The class token of PVT 1: eps is 1e-5 next to convolutions, 1e-6 elsewhere. ``dtn`` gives the norm of a stage."""
    near, norm = layer_norm(1e-5), layer_norm(1e-6)
    x = images
    for i, (depth, ratio) in enumerate(zip(depths, (8, 4, 2, 1), strict=True), 1):
        embed = f'patch_embed{i}'
        x = F.conv2d(x, state[f'{embed}.proj.weight'], state[f'{embed}.proj.bias'], stride=4 if i == 1 else 2)
        grid = x.shape[2:]
        x = near(x.flatten(2).transpose(1, 2), state, f'{embed}.norm')
        if i == 4:
            x = torch.cat((state['cls_token'].expand(len(x), -1, -1), x), 1)
        x = x + state[f'pos_embed{i}']
        inside = dtn(i) if dtn and i < 4 else norm
        for j in range(depth):
            name = f'block{i}.{j}'
            z = inside(x, state, f'{name}.norm1')
            keys = z
            if ratio > 1:
                reduce = f'{name}.attn.sr'
                maps = z.transpose(1, 2).unflatten(2, grid)
                maps = F.conv2d(maps, state[f'{reduce}.weight'], state[f'{reduce}.bias'], stride=ratio)
                keys = near(maps.flatten(2).transpose(1, 2), state, f'{name}.attn.norm')
            k, v = linear(keys, state, f'{name}.attn.kv').chunk(2, -1)
            z = attend(linear(z, state, f'{name}.attn.q'), k, v, heads[i - 1])
            x = x + linear(z, state, f'{name}.attn.proj')
            x = x + mlp(inside(x, state, f'{name}.norm2'), state, f'{name}.mlp')
        if i < 4:
            x = x.transpose(1, 2).unflatten(2, grid)
    return norm(x, state, 'norm')[:, 0]


def t2t(images: Tensor, state: State, heads: int, depth: int) -> Tensor:
    """T2T-ViT of its authors, with the position table of the file, its token module of either kind."""
    norm = layer_norm(1e-5)
    x = images
    for i, (kernel, stride, padding) in enumerate(((7, 4, 2), (3, 2, 1), (3, 2, 1)), 1):
        side = (x.shape[-1] + 2 * padding - kernel) // stride + 1
        x = F.unfold(x, kernel, stride=stride, padding=padding).transpose(1, 2)
        if i < 3:
            name = f'tokens_to_token.attention{i}'
            x = performer(x, state, name) if f'{name}.w' in state else transformer(x, state, name)
            x = x.transpose(1, 2).unflatten(2, (side, side))
    x = linear(x, state, 'tokens_to_token.project')
    x = torch.cat((state['cls_token'].expand(len(x), -1, -1), x), 1) + state['pos_embed']
    for i in range(depth):
        x = plain_block(x, state, f'blocks.{i}', heads, norm)
    return norm(x, state, 'norm')[:, 0]


def transformer(x: Tensor, state: State, name: str) -> Tensor:
    norm = layer_norm(1e-5)
    width = x.shape[-1]
    q, k, v = linear(norm(x, state, f'{name}.norm1'), state, f'{name}.attn.qkv').chunk(3, -1)
    x = v + linear((q @ k.transpose(1, 2) / width**0.5).softmax(-1) @ v, state, f'{name}.attn.proj')
    return x + mlp(norm(x, state, f'{name}.norm2'), state, f'{name}.mlp')


def performer(x: Tensor, state: State, name: str) -> Tensor:
    norm, w = layer_norm(1e-5), state[f'{name}.w']
    k, q, v = linear(norm(x, state, f'{name}.norm1'), state, f'{name}.kqv').chunk(3, -1)
    q, k = ((t @ w.T - t.square().sum(-1, keepdim=True) / 2).exp() / len(w) ** 0.5 for t in (q, k))
    y = q @ (k.transpose(1, 2) @ v) / ((q * k.sum(1, keepdim=True)).sum(-1, keepdim=True) + 1e-8)
    x = v + linear(y, state, f'{name}.proj')
    z = norm(x, state, f'{name}.norm2')
    return x + linear(F.gelu(linear(z, state, f'{name}.mlp.0')), state, f'{name}.mlp.2')
