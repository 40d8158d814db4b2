"""Checkpoints in the formats of the papers' code, with random weights."""

import re
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .arithmetic import State

WIDTHS = (64, 128, 320, 512)


class Weights(dict):
    """Collects random tensors. Weights of norms are close to 1. Sums of tokens and positions are exact."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)

    def random(self, *shape: int, std: float = 1.0) -> Tensor:
        return torch.randn(shape, generator=self.generator) * std

    def layer(self, name: str, out: int, *inputs: int, bias: bool = True) -> None:
        self[f'{name}.weight'] = self.random(out, *inputs, std=torch.tensor(inputs).prod().item() ** -0.5)
        if bias:
            self[f'{name}.bias'] = self.random(out, std=0.1)

    def position(self, name: str, *shape: int) -> None:
        self[name] = (self.random(*shape) * 256).round() / 4096

    def variance(self, name: str, *shape: int, mean: float = 1.0) -> None:
        self[name] = mean * (0.5 + torch.rand(shape, generator=self.generator))

    def norm(self, name: str, channels: int, kind: str = 'layer', heads: int = 0) -> None:
        """Adds a norm. ``kind`` is its name in the DTN authors' code, or ``'un'``."""
        if kind == 'scale':
            self[f'{name}.scale'] = channels**0.5 * (1 + self.random(channels, std=0.1))
            return
        self[f'{name}.weight'] = 1 + self.random(channels, std=0.1)
        self[f'{name}.bias'] = self.random(channels, std=0.1)
        if kind == 'batch':
            self.running(f'{name}.bn', channels, 16.0)  # tokens would grow from block to block with less
        if kind == 'power':
            self.variance(f'{name}.running_phi', 1, channels, 1, 1)
            self[f'{name}.ema_gz'] = self.random(1, channels, 1, 1, std=0.1)
        if kind == 'un':
            self.variance(f'{name}.running_var', channels, mean=16.0)
            self.variance(f'{name}.buffer_x2', 4, channels, mean=16.0)
            self[f'{name}.ema_gz'] = self.random(channels, std=0.1)
            self[f'{name}.buffer_gz'] = self.random(4, channels, std=0.1)
            self[f'{name}.skip_counter'] = torch.tensor([3])
        if kind in ('power', 'un'):
            self[f'{name}.iters'] = torch.tensor([5000])
        if kind.startswith('dtn'):
            for moment in ('var',) if kind == 'dtn_var' else ('mean', 'var'):
                self[f'{name}.{moment}_norm_weight'] = self.random(heads)
            self.layer(f'{name}.pos_proj', heads, 3)

    def running(self, name: str, channels: int, variance: float = 1.0) -> None:
        self[f'{name}.running_mean'] = self.random(channels, std=0.1)
        self.variance(f'{name}.running_var', channels, mean=variance)
        self[f'{name}.num_batches_tracked'] = torch.tensor(5000)

    def mlp(self, name: str, width: int, hidden: int) -> None:
        self.layer(f'{name}.fc1', hidden, width)
        self.layer(f'{name}.fc2', width, hidden)

    def block(self, name: str, width: int, ratio: int, bias: bool, kind: str = 'layer', heads: int = 0) -> None:
        for norm in ('norm1', 'norm2'):
            self.norm(f'{name}.{norm}', width, kind, heads)
        self.layer(f'{name}.attn.qkv', 3 * width, width, bias=bias)
        self.layer(f'{name}.attn.proj', width, width)
        self.mlp(f'{name}.mlp', width, ratio * width)


def vit(
    width: int,
    bias: bool = False,
    kind: str = 'layer',
    heads: int = 0,
    class_position: bool | None = None,
    patch: int = 16,
    side: int = 14,
    inside: int = 10,
) -> State:
    """ViT with timm's names. The DTN authors' ViT has no bias in qkv and no position of the class token."""
    state = Weights()
    state.layer('patch_embed.proj', width, 3, patch, patch)
    state.position('cls_token', 1, 1, width)
    state.position('pos_embed', 1, side * side + (bias if class_position is None else class_position), width)
    for i in range(12):
        state.block(f'blocks.{i}', width, 4, bias, kind if i < inside else 'layer', heads)
    state.norm('norm', width)
    state.layer('head', 10, width)
    return dict(state)


def mmpretrains(state: State, blocks: str, norm: str) -> State:
    """Renames ViT or T2T-ViT as in MMPretrain, where ``blocks`` and the last ``norm`` have other names."""
    out = {}
    for key, value in state.items():
        for theirs, ours in {
            r'^blocks\.': f'{blocks}.',
            r'^norm\.': f'{norm}.',
            r'^patch_embed\.proj\.': 'patch_embed.projection.',
            r'\.norm([12])\.': r'.ln\1.',
            r'\.mlp\.fc1\.': '.ffn.layers.0.0.',
            r'\.mlp\.fc2\.': '.ffn.layers.1.',
            r'^head\.': 'head.layers.head.',
        }.items():
            key = re.sub(theirs, ours, key)
        out[key if key.startswith('head.') else f'backbone.{key}'] = value
    return out


def plain_vit(width: int, kind: str = 'layer') -> State:
    """Other ViT of the DTN authors. ``kind`` is the norm before attention."""
    state = Weights()
    state.layer('to_patch_embedding.1', width, 768)
    state.position('cls_token', 1, 1, width)
    state.position('pos_embedding', 1, 197, width)
    for i in range(12):
        attention, mlps = (f'transformer.layers.{i}.{j}' for j in (0, 1))
        state.norm(f'{attention}.norm', width, kind)
        state.layer(f'{attention}.fn.to_qkv', 3 * width, width, bias=False)
        state.layer(f'{attention}.fn.to_out.0', width, width)
        state.norm(f'{mlps}.norm', width)
        state.layer(f'{mlps}.fn.net.0', 4 * width, width)
        state.layer(f'{mlps}.fn.net.3', width, 4 * width)
    state.norm('mlp_head.0', width)
    state.layer('mlp_head.1', 10, width)
    return dict(state)


def pvt(
    depths: Sequence[int] = (2, 2, 2, 2),
    kind: str = 'layer',
    heads: Sequence[int] = (4, 4, 5),
    widths: Sequence[int] = WIDTHS,
    ratios: Sequence[int] = (8, 8, 4, 4),
    second: bool = False,
) -> State:
    """PVT or PVTv2 with the names of whai362/PVT. ``kind`` is the norm of the blocks in the first three stages."""
    state = Weights()
    channels = 3
    for i, (width, depth, ratio) in enumerate(zip(widths, depths, (8, 4, 2, 1), strict=True), 1):
        patch = (7 if i == 1 else 3) if second else 4 if i == 1 else 2
        state.layer(f'patch_embed{i}.proj', width, channels, patch, patch)
        state.norm(f'patch_embed{i}.norm', width)
        side = 112 // 2**i
        if not second:
            state.position(f'pos_embed{i}', 1, side * side + (i == 4), width)
        for j in range(depth):
            name = f'block{i}.{j}'
            for norm in ('norm1', 'norm2'):
                state.norm(f'{name}.{norm}', width, *((kind, heads[i - 1]) if i < 4 else ()))
            for part, size in (('q', 1), ('kv', 2), ('proj', 1)):
                state.layer(f'{name}.attn.{part}', size * width, width)
            if ratio > 1:
                state.layer(f'{name}.attn.sr', width, width, ratio, ratio)
                state.norm(f'{name}.attn.norm', width)
            state.mlp(f'{name}.mlp', width, width * ratios[i - 1])
            if second:
                state.layer(f'{name}.mlp.dwconv.dwconv', width * ratios[i - 1], 1, 3, 3)
        if second:
            state.norm(f'norm{i}', width)
        channels = width
    if not second:
        state.position('cls_token', 1, 1, channels)
        state.norm('norm', channels)
    state.layer('head', 10, channels)
    return dict(state)


def timms_pvt(state: State) -> State:
    """PVTv2 with timm's names."""
    out = {}
    for key, value in state.items():
        key = re.sub(r'^patch_embed1', 'patch_embed', key)
        key = re.sub(r'^patch_embed(\d)', lambda m: f'stages.{int(m[1]) - 1}.downsample', key)
        key = re.sub(r'^block(\d)', lambda m: f'stages.{int(m[1]) - 1}.blocks', key)
        key = re.sub(r'^norm(\d)', lambda m: f'stages.{int(m[1]) - 1}.norm', key)
        out[key.replace('.dwconv.dwconv.', '.dwconv.')] = value
    return out


def mmdets_pvt(state: State) -> State:
    """PVT with MMDetection's names, without classifier. The linear layers of MLPs are convolutions."""
    out = {}
    first = 'pos_embed1' in state
    for key, value in state.items():
        if not (match := re.fullmatch(r'(patch_embed|pos_embed|block|norm)(\d)(\.(.+))?', key)):
            continue  # the class token and what follows it
        part, stage, rest = match[1], f'backbone.layers.{int(match[2]) - 1}', match[4]
        if part == 'patch_embed':
            out[f'{stage}.0.{rest.replace("proj", "projection")}'] = value
        elif part == 'pos_embed':
            out[f'{stage}.1.0.pos_embed'] = value[:, -((112 // 2 ** int(match[2])) ** 2) :]
        elif part == 'norm':
            out[f'{stage}.2.{rest}'] = value
        else:
            number, name = rest.split('.', 1)
            block, kind = f'{stage}.1.{int(number) + first}', name.rpartition('.')[2]
            if name.startswith('attn.q.'):
                other = state[f'block{match[2]}.{number}.attn.kv.{kind}']
                out[f'{block}.attn.attn.in_proj_{kind}'] = torch.cat((value, other))
            elif name.startswith('attn.proj.'):
                out[f'{block}.attn.attn.out_proj.{kind}'] = value
            elif name.startswith('mlp.dwconv'):
                out[f'{block}.ffn.layers.1.{kind}'] = value
            elif name.startswith('mlp.'):
                layer = 0 if 'fc1' in name else 3 if first else 4
                out[f'{block}.ffn.layers.{layer}.{kind}'] = value[..., None, None] if kind == 'weight' else value
            elif not name.startswith('attn.kv.'):
                out[f'{block}.{name}'] = value
    return out


def swin(width: int, depths: Sequence[int], heads: Sequence[int]) -> State:
    """Swin with Microsoft's names. Only detectors have norms after the first stages."""
    state = Weights()
    state.layer('patch_embed.proj', width, 3, 4, 4)
    state.norm('patch_embed.norm', width)
    for i, depth in enumerate(depths):
        for j in range(depth):
            name = f'layers.{i}.blocks.{j}'
            state.block(name, width, 4, bias=True)
            state[f'{name}.attn.relative_position_bias_table'] = state.random(169, heads[i])
            state[f'{name}.attn.relative_position_index'] = torch.zeros(49, 49, dtype=torch.long)
        if i < 3:
            state.norm(f'layers.{i}.downsample.norm', 4 * width)
            state.layer(f'layers.{i}.downsample.reduction', 2 * width, 4 * width, bias=False)
            width *= 2
    state.norm('norm', width)
    state.layer('head', 10, width)
    return dict(state)


def with_norms_of_maps(state: State) -> State:
    """Swin in a detector, which has one norm for the map of each stage."""
    norms = Weights(1)
    for i in range(4):
        norms.norm(f'norm{i}', state['patch_embed.norm.weight'].numel() * 2**i)
    return {key: value for key, value in state.items() if not re.match(r'(norm|head)\.', key)} | norms


def timms_swin(state: State) -> State:
    """Renames patch mergings as in timm, where they are part of the following stage."""
    return {
        re.sub(r'^layers\.(\d)\.downsample', lambda m: f'layers.{int(m[1]) + 1}.downsample', key): value
        for key, value in state.items()
    }


def mms_swin(state: State) -> State:
    """Swin of MMDetection and MMPretrain, which order merged tokens by channel, row and column."""
    out = {}
    for key, value in state.items():
        if '.downsample.' in key:  # theirs are counted by column, row and channel
            value = value.unflatten(-1, (2, 2, -1)).movedim((-3, -2, -1), (-1, -2, -3)).flatten(-3)
        for theirs, ours in {
            r'^layers\.': 'stages.',
            r'^norm\.': 'norm3.',
            r'patch_embed\.proj\.': 'patch_embed.projection.',
            r'\.attn\.': '.attn.w_msa.',
            r'\.mlp\.fc1\.': '.ffn.layers.0.0.',
            r'\.mlp\.fc2\.': '.ffn.layers.1.',
            r'^head\.': 'head.fc.',
        }.items():
            key = re.sub(theirs, ours, key)
        out[key if key.startswith('head.') else f'backbone.{key}'] = value
    return out


def levit(widths: Sequence[int], key_width: int, heads: Sequence[int], depths: Sequence[int]) -> State:
    """LeViT with the authors' names, which number the sub-blocks across all stages."""
    state = Weights()

    def with_bn(name: str, out: int, *inputs: int) -> None:
        state.layer(f'{name}.c', out, *inputs, bias=False)
        state.norm(f'{name}.bn', out)
        state.running(f'{name}.bn', out)

    def mlp(width: int) -> None:
        with_bn(f'blocks.{number}.m.0', 2 * width, width)
        with_bn(f'blocks.{number}.m.2', width, 2 * width)

    for i in range(4):
        with_bn(f'patch_embed.{2 * i}', widths[0] >> (3 - i), widths[0] >> (4 - i) if i else 3, 3, 3)
    number, side = 0, 14
    for stage, (width, depth) in enumerate(zip(widths, depths, strict=True)):
        if stage:
            before = widths[stage - 1]
            count, name = before // key_width, f'blocks.{number}'
            with_bn(f'{name}.kv', count * 5 * key_width, before)
            with_bn(f'{name}.q.1', count * key_width, before)
            with_bn(f'{name}.proj.1', width, count * 4 * key_width)
            state[f'{name}.attention_biases'] = state.random(count, side * side)
            side, number = (side - 1) // 2 + 1, number + 1
            mlp(width)
            number += 1
        for _ in range(depth):
            count, name = heads[stage], f'blocks.{number}.m'
            with_bn(f'{name}.qkv', count * 4 * key_width, width)
            with_bn(f'{name}.proj.1', width, count * 2 * key_width)
            state[f'{name}.attention_biases'] = state.random(count, side * side)
            number += 1
            mlp(width)
            number += 1
    for head in ('head', 'head_dist'):
        state.norm(f'{head}.bn', widths[-1])
        state.running(f'{head}.bn', widths[-1])
        state.layer(f'{head}.l', 10, widths[-1])
    return dict(state)


def of_sub_block(key: str, depths: Sequence[int]) -> tuple[int, int, str]:
    """Returns the stage of a sub-block of LeViT, its number in this stage, and the rest of the key."""
    number, rest = int(key.split('.')[1]), key.split('.', 2)[2].removeprefix('m.')
    for stage, depth in enumerate(depths):
        count = 2 * depth + 2 * (stage > 0)
        if number < count:
            return stage, number, rest
        number -= count
    raise ValueError(key)


def timms_levit(state: State, depths: Sequence[int]) -> State:
    out = {}
    for key, value in state.items():
        name = key.replace('.c.', '.linear.').replace('.l.', '.linear.')
        if name.startswith('patch_embed.'):
            name = re.sub(r'^patch_embed\.(\d)', lambda m: f'stem.conv{int(m[1]) // 2 + 1}', name)
        elif name.startswith('blocks.'):
            stage, number, rest = of_sub_block(name, depths)
            rest = re.sub(r'^(q|proj)\.1\.', r'\1.ln.', rest)
            rest = re.sub(r'^([02])\.', lambda m: f'ln{int(m[1]) // 2 + 1}.', rest)
            down = stage > 0 and number < 2
            place = 'downsample' if down else f'blocks.{number // 2 - (stage > 0)}'
            part = 'mlp' if number % 2 else 'attn_downsample' if down else 'attn'
            name = f'stages.{stage}.{place}.{part}.{rest}'
        out[name] = value
    return out


def mmpretrains_levit(state: State, depths: Sequence[int]) -> State:
    out = {}
    for key, value in state.items():
        name = key.replace('.c.', '.linear.').replace('.l.', '.linear.')
        if name.startswith('patch_embed.'):
            name = f'backbone.patch_embed.{name.replace(".linear.", ".conv.")}'
        elif name.startswith('blocks.'):
            stage, number, rest = of_sub_block(name, depths)
            rest = re.sub(r'^([02])\.', lambda m: f'linear{int(m[1]) // 2 + 1}.', rest)
            residual = '' if stage > 0 and number == 0 else 'block.'
            name = f'backbone.stages.{stage}.{number}.{residual}{rest}'
        else:
            name = f'head.{name}'
        out[name] = value
    return out


def sines(positions: int, channels: int) -> Tensor:
    """Position table of T2T-ViT, computed in float64 and stored in float32."""
    j = np.arange(channels)
    angles = np.arange(positions)[:, None] / np.power(10000, 2 * (j // 2) / channels)
    angles[:, 0::2], angles[:, 1::2] = np.sin(angles[:, 0::2]), np.cos(angles[:, 1::2])
    return torch.tensor(angles, dtype=torch.float32)[None]


def resized(table: Tensor, side: int) -> Tensor:
    """Resizes a position table as T2T-ViT's code does: bicubic, without the row of the class token."""
    before = round((table.shape[1] - 1) ** 0.5)
    grid = table[:, 1:].transpose(1, 2).unflatten(2, (before, before))
    grid = F.interpolate(grid, (side, side), mode='bicubic').flatten(2).transpose(1, 2)
    return torch.cat((table[:, :1], grid), 1)


def t2t(
    width: int = 256,
    depth: int = 7,
    ratio: int = 2,
    performer: bool = True,
    table: Tensor | None = None,
    kind: str = 'layer',
) -> State:
    """T2T-ViT with its authors' names. With ``kind='un'``, the norms are UN with the names of UN's authors."""
    state = Weights()
    state.position('cls_token', 1, 1, width)
    state['pos_embed'] = sines(197, width) if table is None else table
    for i, inputs in ((1, 147), (2, 576)):
        name = f'tokens_to_token.attention{i}'
        state.norm(f'{name}.norm1', inputs, kind)
        state.norm(f'{name}.norm2', 64, kind)
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
        state.block(f'blocks.{i}', width, ratio, False, kind)
    state.norm('norm', width, kind)
    state.layer('head', 10, width)
    return dict(state)
