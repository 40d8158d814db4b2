"""Implementations of the published models, written from their descriptions.

Each function takes the state dict of a file with the published names. The functions do not use models of timm,
MMDetection or MMPretrain, and every eps is set explicitly.
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


def over_tokens(x: Tensor, eps: float, unbiased: bool, groups: int | None = None) -> Tensor:
    """Normalises each channel, or each group of channels, over the tokens of an image."""
    shape = x.shape
    if groups:
        x = x.unflatten(2, (groups, -1)).transpose(1, 2).flatten(2)[..., None]  # B x G x (T C / G) x 1
    axis = 2 if groups else 1
    x = x - x.mean(axis, keepdim=True)
    x = x / (x.var(axis, keepdim=True, correction=int(unbiased)) + eps).sqrt()
    return x.unflatten(2, (shape[1], -1)).squeeze(-1).transpose(1, 2).flatten(2) if groups else x


def affine(x: Tensor, state: State, name: str) -> Tensor:
    return x * state[f'{name}.weight'] + state[f'{name}.bias']


def insnorm(x: Tensor, state: State, name: str) -> Tensor:
    return affine(over_tokens(x, 1e-5, unbiased=True), state, name)


def gnorm(groups: int) -> Norm:
    return lambda x, state, name: affine(over_tokens(x, 1e-5, False, groups), state, name)


def scale(x: Tensor, state: State, name: str) -> Tensor:
    return x * state[f'{name}.scale'] / x.square().sum(-1, keepdim=True).sqrt().clamp(min=1e-5)


def batch(x: Tensor, state: State, name: str) -> Tensor:
    mean, var = state[f'{name}.bn.running_mean'], state[f'{name}.bn.running_var']
    return affine((x - mean) / (var + 1e-5).sqrt(), state, name)


def power(groups: int) -> Norm:
    def norm(x: Tensor, state: State, name: str) -> Tensor:
        u = x.unflatten(-1, (groups, -1))
        u = (u / (u.square().mean(-1, keepdim=True) + 1e-5).sqrt()).flatten(-2)
        return affine(u / (state[f'{name}.running_phi'].flatten() + 1e-5).sqrt(), state, name)

    return norm


def unified(x: Tensor, state: State, name: str) -> Tensor:
    return affine(x / (state[f'{name}.running_var'] + 1e-5).sqrt(), state, name)


def linear(x: Tensor, state: State, name: str) -> Tensor:
    return F.linear(x, state[f'{name}.weight'], state.get(f'{name}.bias'))


def attend(q: Tensor, k: Tensor, v: Tensor, heads: int, bias: Tensor | float = 0.0) -> Tensor:
    q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in (q, k, v))
    weights = (q @ k.transpose(2, 3) / q.shape[-1] ** 0.5 + bias).softmax(-1)
    return (weights @ v).transpose(1, 2).flatten(2)


def mlp(x: Tensor, state: State, name: str) -> Tensor:
    return linear(F.gelu(linear(x, state, f'{name}.fc1')), state, f'{name}.fc2')


def plain_block(x: Tensor, state: State, name: str, heads: int, norm: Norm) -> Tensor:
    q, k, v = linear(norm(x, state, f'{name}.norm1'), state, f'{name}.attn.qkv').chunk(3, -1)
    x = x + linear(attend(q, k, v, heads), state, f'{name}.attn.proj')
    return x + mlp(norm(x, state, f'{name}.norm2'), state, f'{name}.mlp')


def vit(images: Tensor, state: State, heads: int, eps: float, cls_from: int = 0, inside: Norm | None = None) -> Tensor:
    """Computes the class token, which joins before block ``cls_from``. Earlier blocks use the norm ``inside``."""
    norm = layer_norm(eps)
    weight = state['patch_embed.proj.weight']
    x = F.conv2d(images, weight, state['patch_embed.proj.bias'], stride=weight.shape[-1])
    x, position, token = x.flatten(2).transpose(1, 2), state['pos_embed'], state['cls_token']
    if position.shape[1] == x.shape[1] + 1:
        token, position = token + position[:, :1], position[:, 1:]
    x = x + position
    for i in range(12):
        if i == cls_from:
            x = torch.cat((token.expand(len(x), -1, -1), x), 1)
        x = plain_block(x, state, f'blocks.{i}', heads, inside if inside and i < cls_from else norm)
    return norm(x, state, 'norm')[:, 0]


def plain_vit(images: Tensor, state: State, heads: int) -> Tensor:
    """Computes the other ViT of the DTN authors. Patches are flattened with channels last."""
    norm = layer_norm(1e-5)
    x = images.unflatten(3, (14, 16)).unflatten(2, (14, 16)).permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)
    x = linear(x, state, 'to_patch_embedding.1')
    x = torch.cat((state['cls_token'].expand(len(x), -1, -1), x), 1) + state['pos_embedding']
    for i in range(12):
        attention, mlps = (f'transformer.layers.{i}.{j}' for j in (0, 1))
        q, k, v = linear(norm(x, state, f'{attention}.norm'), state, f'{attention}.fn.to_qkv').chunk(3, -1)
        x = x + linear(attend(q, k, v, heads), state, f'{attention}.fn.to_out.0')
        z = linear(norm(x, state, f'{mlps}.norm'), state, f'{mlps}.fn.net.0')
        x = x + linear(F.gelu(z), state, f'{mlps}.fn.net.3')
    return norm(x, state, 'mlp_head.0')[:, 0]


def pvt(
    images: Tensor,
    state: State,
    heads: Sequence[int] = (1, 2, 5, 8),
    inside: Callable[[int], Norm] | None = None,
    eps: tuple[float, float] = (1e-5, 1e-6),
    maps: bool = False,
) -> Tensor | list[Tensor]:
    """Computes PVT or PVTv2, whichever the tensors belong to.

    Returns the class token of PVT, the mean of PVTv2, or the maps of all stages. The first ``eps`` is used next to
    convolutions. ``inside`` returns the norm of the blocks of a stage.
    """
    near, norm = (layer_norm(number) for number in eps)
    second = 'pos_embed1' not in state
    x, outs = images, []
    for i in range(1, 5):
        embed = f'patch_embed{i}'
        weight = state[f'{embed}.proj.weight']
        padding = weight.shape[-1] // 2 if second else 0
        x = F.conv2d(x, weight, state[f'{embed}.proj.bias'], stride=4 if i == 1 else 2, padding=padding)
        grid = x.shape[2:]
        x = near(x.flatten(2).transpose(1, 2), state, f'{embed}.norm')
        if not second:
            x = torch.cat((state['cls_token'].expand(len(x), -1, -1), x), 1) if i == 4 and not maps else x
            x = x + state[f'pos_embed{i}'][:, -x.shape[1] :]
        of_stage = inside(i) if inside and i < 4 else norm
        j = 0
        while f'block{i}.{j}.attn.q.weight' in state:
            name = f'block{i}.{j}'
            keys = z = of_stage(x, state, f'{name}.norm1')
            if f'{name}.attn.sr.weight' in state:
                reduce = state[f'{name}.attn.sr.weight']
                pictures = z.transpose(1, 2).unflatten(2, grid)
                pictures = F.conv2d(pictures, reduce, state[f'{name}.attn.sr.bias'], stride=reduce.shape[-1])
                keys = near(pictures.flatten(2).transpose(1, 2), state, f'{name}.attn.norm')
            k, v = linear(keys, state, f'{name}.attn.kv').chunk(2, -1)
            z = attend(linear(z, state, f'{name}.attn.q'), k, v, heads[i - 1])
            x = x + linear(z, state, f'{name}.attn.proj')
            z = linear(of_stage(x, state, f'{name}.norm2'), state, f'{name}.mlp.fc1')
            if second:
                conv = f'{name}.mlp.dwconv.dwconv'
                z = z.transpose(1, 2).unflatten(2, grid)
                z = F.conv2d(z, state[f'{conv}.weight'], state[f'{conv}.bias'], padding=1, groups=z.shape[1])
                z = z.flatten(2).transpose(1, 2)
            x = x + linear(F.gelu(z), state, f'{name}.mlp.fc2')
            j += 1
        x = norm(x, state, f'norm{i}') if second else x
        if i < 4 or maps:
            x = x.transpose(1, 2).unflatten(2, grid)
            outs.append(x)
    if maps:
        return outs
    return x.mean(1) if second else norm(x, state, 'norm')[:, 0]


def swin(images: Tensor, state: State, heads: Sequence[int], maps: bool = False) -> Tensor | list[Tensor]:
    """Computes Swin: the mean over the last map as in Microsoft's code, or all normalised maps as in MMDetection.

    MMDetection also shifts windows if the map is not larger than one window.
    """
    norm = layer_norm(1e-5)
    x = F.conv2d(images, state['patch_embed.proj.weight'], state['patch_embed.proj.bias'], stride=4)
    x = norm(x.permute(0, 2, 3, 1), state, 'patch_embed.norm')
    outs = []
    for i in range(4):
        j = 0
        while f'layers.{i}.blocks.{j}.attn.qkv.weight' in state:
            name = f'layers.{i}.blocks.{j}'
            shift = 3 if j % 2 and (maps or x.shape[1] > 7) else 0
            x = x + in_windows(norm(x, state, f'{name}.norm1'), state, f'{name}.attn', heads[i], shift)
            x = x + mlp(norm(x, state, f'{name}.norm2'), state, f'{name}.mlp')
            j += 1
        if maps:
            outs.append(norm(x, state, f'norm{i}').permute(0, 3, 1, 2))
        if i < 3:
            x = torch.cat([x[:, row::2, column::2] for column in (0, 1) for row in (0, 1)], -1)
            x = linear(norm(x, state, f'layers.{i}.downsample.norm'), state, f'layers.{i}.downsample.reduction')
    return outs if maps else norm(x, state, 'norm').mean((1, 2))


def in_windows(x: Tensor, state: State, name: str, heads: int, shift: int) -> Tensor:
    """Computes attention in a loop over the windows of 7 x 7 tokens of a cyclically shifted map."""
    side = x.shape[1]
    x = x.roll((-shift, -shift), (1, 2))
    place = torch.cartesian_prod(torch.arange(7), torch.arange(7))
    offset = place[:, None] - place[None] + 6
    bias = state[f'{name}.relative_position_bias_table'][offset[..., 0] * 13 + offset[..., 1]].permute(2, 0, 1)
    # Regions that were neighbours before the shift.
    part = torch.tensor([0 if t < side - 7 else 1 if t < side - shift else 2 for t in range(side)])
    region = (3 * part[:, None] + part[None]) if shift else torch.zeros(side, side)
    out = torch.empty_like(x)
    for top in range(0, side, 7):
        for left in range(0, side, 7):
            window = (slice(None), slice(top, top + 7), slice(left, left + 7))
            q, k, v = linear(x[window].flatten(1, 2), state, f'{name}.qkv').chunk(3, -1)
            own = region[window[1:]].flatten()
            apart = (own[:, None] != own[None]) * -100.0
            z = attend(q, k, v, heads, bias + apart)
            out[window] = linear(z, state, f'{name}.proj').unflatten(1, (7, 7))
    return out.roll((shift, shift), (1, 2))


def batch_norm(x: Tensor, state: State, name: str) -> Tensor:
    """Applies batch norm along the last dimension."""
    x = (x - state[f'{name}.running_mean']) / (state[f'{name}.running_var'] + 1e-5).sqrt()
    return affine(x, state, name)


def layer_and_bn(x: Tensor, state: State, name: str) -> Tensor:
    return batch_norm(F.linear(x, state[f'{name}.c.weight']), state, f'{name}.bn')


def levit(images: Tensor, state: State, key_width: int, heads: Sequence[int], depths: Sequence[int]) -> Tensor:
    """Computes LeViT with its authors' names. Returns the mean over the last tokens."""
    x = images
    for i in (0, 2, 4, 6):
        x = F.conv2d(x, state[f'patch_embed.{i}.c.weight'], stride=2, padding=1)
        x = batch_norm(x.permute(0, 2, 3, 1), state, f'patch_embed.{i}.bn').permute(0, 3, 1, 2)
        x = F.hardswish(x) if i < 6 else x
    side = x.shape[-1]
    x = x.flatten(2).transpose(1, 2)
    number = 0
    for stage, depth in enumerate(depths):
        if stage:
            name, width = f'blocks.{number}', x.shape[-1]
            q = layer_and_bn(x.unflatten(1, (side, side))[:, ::2, ::2].flatten(1, 2), state, f'{name}.q.1')
            x = of_levit(x, q, state, name, key_width, width // key_width, 4, side)
            side = (side - 1) // 2 + 1
            x, number = x + levit_mlp(x, state, f'blocks.{number + 1}.m'), number + 2
        for _ in range(depth):
            x = x + of_levit(x, None, state, f'blocks.{number}.m', key_width, heads[stage], 2, side)
            x, number = x + levit_mlp(x, state, f'blocks.{number + 1}.m'), number + 2
    return x.mean(1)


def of_levit(
    x: Tensor, q: Tensor | None, state: State, name: str, width: int, heads: int, ratio: int, side: int
) -> Tensor:
    """Computes attention. ``q`` has every second row and column. Values are ``ratio`` times as wide as keys."""
    step = 1 if q is None else 2
    z = layer_and_bn(x, state, f'{name}.qkv' if q is None else f'{name}.kv').unflatten(-1, (heads, -1))
    if q is None:
        q, k, v = z.split((width, width, ratio * width), -1)
    else:
        k, v = z.split((width, ratio * width), -1)
        q = q.unflatten(-1, (heads, -1))
    place = torch.cartesian_prod(torch.arange(side), torch.arange(side))
    mine = step * torch.cartesian_prod(*[torch.arange((side - 1) // step + 1)] * 2)
    far = (mine[:, None] - place[None]).abs()
    bias = state[f'{name}.attention_biases'][:, far[..., 0] * side + far[..., 1]]
    scores = torch.einsum('bqhd,bkhd->bhqk', q, k) / width**0.5 + bias
    out = torch.einsum('bhqk,bkhd->bqhd', scores.softmax(-1), v).flatten(2)
    return layer_and_bn(F.hardswish(out), state, f'{name}.proj.1')


def levit_mlp(x: Tensor, state: State, name: str) -> Tensor:
    return layer_and_bn(F.hardswish(layer_and_bn(x, state, f'{name}.0')), state, f'{name}.2')


def t2t(images: Tensor, state: State, heads: int) -> Tensor:
    """Computes T2T-ViT with its authors' names, for both kinds of token modules and norms."""
    norm = unified if 'norm.running_var' in state else layer_norm(1e-5)
    x = images
    for i, (kernel, stride, padding) in enumerate(((7, 4, 2), (3, 2, 1), (3, 2, 1)), 1):
        side = (x.shape[-1] + 2 * padding - kernel) // stride + 1
        x = F.unfold(x, kernel, stride=stride, padding=padding).transpose(1, 2)
        if i < 3:
            name = f'tokens_to_token.attention{i}'
            x = (performer if f'{name}.w' in state else transformer)(x, state, name, norm)
            x = x.transpose(1, 2).unflatten(2, (side, side))
    x = linear(x, state, 'tokens_to_token.project')
    x = torch.cat((state['cls_token'].expand(len(x), -1, -1), x), 1) + state['pos_embed']
    i = 0
    while f'blocks.{i}.attn.qkv.weight' in state:
        x, i = plain_block(x, state, f'blocks.{i}', heads, norm), i + 1
    return norm(x, state, 'norm')[:, 0]


def transformer(x: Tensor, state: State, name: str, norm: Norm) -> Tensor:
    width = x.shape[-1]
    q, k, v = linear(norm(x, state, f'{name}.norm1'), state, f'{name}.attn.qkv').chunk(3, -1)
    x = v + linear((q @ k.transpose(1, 2) / width**0.5).softmax(-1) @ v, state, f'{name}.attn.proj')
    return x + mlp(norm(x, state, f'{name}.norm2'), state, f'{name}.mlp')


def performer(x: Tensor, state: State, name: str, norm: Norm) -> Tensor:
    w = state[f'{name}.w']
    k, q, v = linear(norm(x, state, f'{name}.norm1'), state, f'{name}.kqv').chunk(3, -1)
    q, k = ((t @ w.T - t.square().sum(-1, keepdim=True) / 2).exp() / len(w) ** 0.5 for t in (q, k))
    y = q @ (k.transpose(1, 2) @ v) / ((q * k.sum(1, keepdim=True)).sum(-1, keepdim=True) + 1e-8)
    x = v + linear(y, state, f'{name}.proj')
    z = norm(x, state, f'{name}.norm2')
    return x + linear(F.gelu(linear(z, state, f'{name}.mlp.0')), state, f'{name}.mlp.2')
