"""Published models with random weights, each with its file and its outputs.

The models are those of timm, MMDetection and MMPretrain. The names of the original repositories are derived from them.
The DTN authors' models consist of blocks of timm and MMDetection with a dense DTN, under the authors' names.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import timm
import torch
from mmdet.models.backbones.pvt import PyramidVisionTransformer, pvt_convert
from mmdet.models.backbones.swin import SwinTransformer, swin_converter
from mmpretrain.models.backbones import LeViT, VisionTransformer
from mmpretrain.models.backbones import SwinTransformer as MMPretrainSwin
from torch import Tensor, nn

from mmdtn.checkpoints.t2t import sines

from ..backbones.helpers import randomised
from ..backbones.test_t2t import mmpretrains as t2t_of_mmpretrain

State = dict[str, Tensor]


@dataclass
class Published:
    file: dict  # as torch.save would write it
    compute: Callable[[Tensor], list[Tensor]]
    backbone: dict  # a config of ours that computes the same
    to: str  # --to
    said: str  # --from
    side: int = 96


def of(state: State) -> State:
    return {key: value.clone() for key, value in state.items()}


def pvt(depths: tuple[int, ...] = (2, 2, 2, 2)) -> Published:
    """PVT of whai362/PVT, computed by MMDetection's layers. The last stage includes the class token."""
    peer = original_pvt(depths)
    peer.init_weights()
    randomised(peer)
    state = _original_pvt(peer.state_dict())
    head = dict(cls_token=torch.randn(1, 1, 512), position=torch.randn(1, 1, 512))
    norm = randomised(nn.LayerNorm(512, eps=1e-6))
    state['pos_embed4'] = torch.cat((head['position'], state['pos_embed4']), 1)
    state |= {'cls_token': head['cls_token'], 'norm.weight': norm.weight.data, 'norm.bias': norm.bias.data}
    state |= {'head.weight': torch.randn(1000, 512), 'head.bias': torch.randn(1000)}
    for key, value in pvt_convert(state).items():  # MMDetection reads the names as we write them
        assert torch.equal(value, peer.state_dict()[key])

    def compute(x: Tensor) -> list[Tensor]:
        return [_class_token(peer, x, head['cls_token'] + head['position'], norm)]

    return Published(dict(model=state), compute, dict(type='PVTDTN', out_type='cls_token'), 'tiny', 'pvt')


def original_pvt(depths: tuple[int, ...] = (2, 2, 2, 2)) -> nn.Module:
    """MMDetection's PVT with the eps of whai362/PVT, 1e-5 next to convolutions."""
    peer = PyramidVisionTransformer(num_layers=depths)
    for name, module in peer.named_modules():
        if isinstance(module, nn.LayerNorm) and re.search(r'\.0\.norm$|attn\.norm$', name):
            module.eps = 1e-5
    return peer


def _class_token(peer: nn.Module, x: Tensor, token: Tensor, norm: nn.Module) -> Tensor:
    """Runs the four stages of MMDetection's PVT. A class token is added before the last stage."""
    for i, (embed, layers, _) in enumerate(peer.layers):
        x, hw = embed(x)
        position, *blocks = layers
        x = position(x, hw)
        if i == 3:
            x = torch.cat((token.expand(len(x), -1, -1), x), 1)
            hw = (1, x.shape[1])
        for block in blocks:
            x = block(x, hw)
        if i < 3:
            x = x.transpose(1, 2).unflatten(2, hw)
    return norm(x)[:, 0]


def pvt_v2(size: str = 'b0') -> Published:
    peer = randomised(timm.create_model(f'pvt_v2_{size}', num_classes=0))
    state = {}
    for key, value in peer.state_dict().items():
        key = re.sub(r'^patch_embed\.', 'patch_embed1.', key)
        key = re.sub(r'^stages\.(\d)\.downsample\.', lambda m: f'patch_embed{int(m[1]) + 1}.', key)
        key = re.sub(r'^stages\.(\d)\.blocks\.', lambda m: f'block{int(m[1]) + 1}.', key)
        key = re.sub(r'^stages\.(\d)\.norm\.', lambda m: f'norm{int(m[1]) + 1}.', key)
        state[key.replace('.dwconv.', '.dwconv.dwconv.')] = value
    state |= {'head.weight': torch.randn(1000, peer.num_features), 'head.bias': torch.randn(1000)}
    pvt_convert(state)
    backbone = dict(type='PVTDTN', arch=size, out_type='cls_token')
    return Published(state, lambda x: [peer(x)], backbone, size, 'pvt')


MMDET_PVT = dict(type='PVTDTN', other_norm_cfg=dict(type='LN', eps=1e-6))


def mmdet_pvt() -> Published:
    peer = PyramidVisionTransformer(num_layers=[2, 2, 2, 2])
    peer.init_weights()
    randomised(peer)
    state = {f'backbone.{key}': value for key, value in peer.state_dict().items()}
    file = dict(
        meta=dict(epoch=12), state_dict=state | {'neck.lateral_convs.0.conv.weight': torch.zeros(256, 64, 1, 1)}
    )
    return Published(file, lambda x: list(peer(x)), MMDET_PVT, 'tiny', 'mmdet-pvt')


def mmdet_swin() -> Published:
    peer = SwinTransformer()
    peer.init_weights()
    randomised(peer)
    file = dict(state_dict={f'backbone.{key}': value for key, value in of(peer.state_dict()).items()})
    return Published(file, lambda x: list(peer(x)), dict(type='SwinDTN'), 'tiny', 'mmdet-swin')


def mmpretrain_swin() -> Published:
    peer = MMPretrainSwin('tiny', img_size=224)
    randomised(peer)
    state = {f'backbone.{key}': value for key, value in peer.state_dict().items()}
    file = dict(state_dict=state | {'head.fc.weight': torch.randn(1000, 768), 'head.fc.bias': torch.randn(1000)})
    backbone = dict(type='SwinDTN', out_type='avg_featmap')
    return Published(file, lambda x: [peer(x)[0].mean((2, 3))], backbone, 'tiny', 'mmpretrain-swin', side=224)


def swin(size: str = 'tiny', depths: tuple[int, ...] = (2, 2, 6, 2)) -> Published:
    """Microsoft's Swin, derived from timm's. Patch mergings and buffers have Microsoft's names."""
    peer = randomised(timm.create_model(f'swin_{size}_patch4_window7_224', num_classes=0))
    state = {}
    for key, value in peer.state_dict().items():
        key = re.sub(r'^layers\.(\d)\.downsample', lambda m: f'layers.{int(m[1]) - 1}.downsample', key)
        state[key] = value
    names = {key.removeprefix('backbone.') for key in swin_converter(of(state))}
    assert names - {'norm.weight', 'norm.bias'} < set(SwinTransformer(depths=depths).state_dict())
    for i, depth in enumerate(depths):
        for j in range(depth):
            state[f'layers.{i}.blocks.{j}.attn.relative_position_index'] = torch.zeros(49, 49, dtype=torch.long)
    state['layers.0.blocks.1.attn_mask'] = torch.zeros(64, 49, 49)
    state |= {'head.weight': torch.randn(1000, 768), 'head.bias': torch.randn(1000)}
    backbone = dict(type='SwinDTN', out_type='avg_featmap')
    return Published(dict(model=state), lambda x: [peer(x)], backbone, size, 'swin', side=224)


def timm_pvt() -> Published:
    peer = randomised(timm.create_model('pvt_v2_b0'))
    backbone = dict(type='PVTDTN', arch='b0', out_type='cls_token')
    return Published(
        of(peer.state_dict()), lambda x: [peer.forward_head(peer.forward_features(x), True)], backbone, 'b0', 'timm'
    )


def timm_swin() -> Published:
    peer = randomised(timm.create_model('swin_tiny_patch4_window7_224'))
    backbone = dict(type='SwinDTN', out_type='avg_featmap')
    return Published(
        of(peer.state_dict()),
        lambda x: [peer.forward_head(peer.forward_features(x), pre_logits=True)],
        backbone,
        'tiny',
        'timm',
        side=224,
    )


def timm_vit() -> Published:
    peer = randomised(timm.create_model('deit_tiny_patch16_224', dynamic_img_size=True))
    return Published(
        of(peer.state_dict()),
        lambda x: [peer.forward_head(peer.forward_features(x), pre_logits=True)],
        dict(type='ViTDTN', arch='t'),
        't',
        'timm',
    )


def mmpretrain_vit() -> Published:
    peer = randomised(VisionTransformer('deit-tiny', img_size=224))
    state = {f'backbone.{key}': value for key, value in peer.state_dict().items()}
    file = dict(state_dict=state | {'head.layers.head.weight': torch.randn(1000, 192)})
    backbone = dict(type='ViTDTN', arch='t')
    return Published(file, lambda x: list(peer(x)), backbone, 't', 'mmpretrain-vit', side=224)


def mmpretrain_t2t() -> Published:
    peer = randomised(t2t_of_mmpretrain(384, 14, 6))
    state = {f'backbone.{key}': value for key, value in of(peer.state_dict()).items()}
    file = dict(state_dict=state | {'head.layers.head.weight': torch.randn(1000, 384)})
    return Published(file, lambda x: list(peer(x)), dict(type='T2TViTDTN'), 't-14', 'mmpretrain-t2t')


def t2t() -> Published:
    """Renames MMPretrain's tensors as in the authors' code, and adds the position table."""
    published = mmpretrain_t2t()
    state = {}
    for key, value in published.file['state_dict'].items():
        for theirs, authors in {
            'backbone.': '',
            'encoder.': 'blocks.',
            'ln1': 'norm1',
            'ln2': 'norm2',
            'ffn.layers.0.0': 'mlp.fc1',
            'ffn.layers.1': 'mlp.fc2',
            'head.layers.head': 'head',
        }.items():
            key = key.replace(theirs, authors)
        state[key] = value
    state['pos_embed'] = sines(197, 384)[None]
    file = dict(state_dict_ema=state)
    return Published(file, published.compute, published.backbone, 't-14', 't2t')


LEVIT = dict(type='LeViTDTN', norm_cfg=None)


def timm_levit() -> Published:
    peer = randomised(timm.create_model('levit_128s'))  # with two heads
    return Published(
        of(peer.state_dict()),
        lambda x: [peer.forward_head(peer.forward_features(x), pre_logits=True)],
        LEVIT,
        '128s',
        'timm',
        side=224,
    )


def mmpretrain_levit() -> Published:
    peer = LeViT('128s', out_indices=(2,))
    randomised(peer)
    state = {f'backbone.{key}': value for key, value in of(peer.state_dict()).items()}
    for name in ('head', 'head_dist'):
        state |= {f'head.{name}.bn.weight': torch.randn(384), f'head.{name}.linear.weight': torch.randn(1000, 384)}
    return Published(
        dict(state_dict=state), lambda x: [peer(x)[0].mean((2, 3))], LEVIT, '128s', 'mmpretrain-levit', side=224
    )


def levit() -> Published:
    """Renames MMPretrain's tensors as in the authors' code, which numbers sub-blocks across all stages."""
    published = mmpretrain_levit()
    state = {}
    for key, value in published.file['state_dict'].items():
        if match := re.fullmatch(r'backbone\.stages\.(\d)\.(\d+)\.(.+)', key):
            number = (0, 4, 12)[int(match[1])] + int(match[2])  # 2, 3 and 4 blocks, and one in front of the last two
            rest = match[3].replace('block.', 'm.').replace('linear1.', '0.').replace('linear2.', '2.')
            key = f'blocks.{number}.{rest.replace("linear.", "c.")}'
        else:
            key = key.replace('backbone.patch_embed.', '').replace('.conv.', '.c.')
            key = key.replace('head.head', 'head').replace('linear.', 'l.')
        state[key] = value
    return Published(dict(model=state), published.compute, LEVIT, '128s', 'levit', side=224)


AUTHORS = dict(type='DTN', unbiased=True, pool_second_moment=False)


def dtn_vit() -> Published:
    """The authors' ViT-T* without bias in qkv. The class token has no position and joins before block 10."""
    norm = partial(nn.LayerNorm, eps=1e-5)
    peer = timm.create_model('vit_tiny_patch16_224', num_heads=4, qkv_bias=False, num_classes=0, norm_layer=norm)
    for block in peer.blocks[:10]:
        block.norm1, block.norm2 = (AuthorsDTN(192, 4, 14, 1) for _ in range(2))
    randomised(peer)
    position = torch.randn(1, 196, 192)

    def compute(x: Tensor) -> list[Tensor]:
        x = peer.patch_embed(x) + position
        x = peer.blocks[:10](x)
        x = torch.cat((peer.cls_token.expand(len(x), -1, -1), x), 1)
        return [peer.norm(peer.blocks[10:](x))[:, 0]]

    state = of(peer.state_dict()) | {'pos_embed': position, 'head.weight': torch.randn(10, 192)}
    state['blocks.0.norm1.rel_indices'] = torch.zeros(1, 196, 196, 3)
    backbone = dict(type='ViTDTN', arch='t*', norm_cfg=AUTHORS)
    return Published(dict(model=state), compute, backbone, 't*', 'dtn', side=224)


def dtn_pvt() -> Published:
    peer = original_pvt()
    peer.init_weights()
    for i, (width, heads, side, pool) in enumerate(((64, 4, 56, 4), (128, 4, 28, 2), (320, 5, 14, 1))):
        for block in peer.layers[i][1][1:]:
            block.attn.attn.num_heads, block.attn.attn.head_dim = heads, width // heads
            block.norm1, block.norm2 = (AuthorsDTN(width, heads, side, pool) for _ in range(2))
    randomised(peer)
    state = _original_pvt(peer.state_dict())
    token, norm = torch.randn(1, 1, 512), randomised(nn.LayerNorm(512, eps=1e-6))
    state['pos_embed4'] = torch.cat((torch.zeros(1, 1, 512), state['pos_embed4']), 1)
    state |= {'cls_token': token, 'norm.weight': norm.weight.data, 'norm.bias': norm.bias.data}
    backbone = dict(type='PVTDTN', out_type='cls_token', norm_cfg=AUTHORS)
    return Published(
        dict(model=state), lambda x: [_class_token(peer, x, token, norm)], backbone, 'tiny', 'dtn', side=224
    )


class AuthorsDTN(nn.Module):
    """DTN as in the authors' code: dense P on a square grid, offsets from key to query, squares of pooled tokens."""

    def __init__(self, channels: int, heads: int, side: int, pool: int) -> None:
        super().__init__()
        self.side, self.pool, self.heads = side, pool, heads
        self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))
        self.mean_norm_weight, self.var_norm_weight = (nn.Parameter(torch.randn(heads)) for _ in range(2))
        self.pos_proj = nn.Linear(3, heads)
        nn.init.normal_(self.pos_proj.weight, std=0.3)
        n = side // pool
        place = torch.cartesian_prod(torch.arange(n), torch.arange(n)).float()
        shift = place[:, None] - place[None]  # query, key, (y, x)
        self.shift = torch.cat((shift.flip(-1), shift.square().sum(-1, keepdim=True)), -1)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        K, n, s = self.heads, self.side // self.pool, self.pool
        z = x.view(B, T, K, -1)
        z = z / (z.pow(2).mean(3, keepdim=True) + 1e-5).sqrt()
        tokens = z.flatten(2)
        cells = tokens.view(B, n, s, n, s, C).mean((2, 4)).view(B, n * n, K, -1)
        P = self.pos_proj(self.shift).softmax(1)
        mean = torch.einsum('ijk,bjkc->bikc', P, cells)
        var = torch.einsum('ijk,bjkc->bikc', P, cells.pow(2)) - mean.pow(2)
        mean, var = (
            t.view(B, n, 1, n, 1, K, C // K).expand(-1, -1, s, -1, s, -1, -1).reshape(B, T, K, -1) for t in (mean, var)
        )
        l, k = (w.sigmoid()[:, None] for w in (self.mean_norm_weight, self.var_norm_weight))
        mean = l * tokens.mean(2)[..., None, None] + (1 - l) * mean
        var = k * tokens.var(2)[..., None, None] + (1 - k) * var
        return ((z - mean) / (var + 1e-5).sqrt()).flatten(2) * self.weight + self.bias


def _original_pvt(state: State) -> State:
    """Renames MMDetection's tensors as in the original repository."""
    out = {}
    for key, value in state.items():
        _, stage, part, rest = key.split('.', 3)
        number = int(stage) + 1
        if part == '0':
            out[f'patch_embed{number}.' + rest.replace('projection', 'proj')] = value
        elif rest == '0.pos_embed':
            out[f'pos_embed{number}'] = value
        else:
            index, name = rest.split('.', 1)
            block = f'block{number}.{int(index) - 1}.'
            C = value.shape[0] // 3
            if '.in_proj_' in name:
                kind = name.rpartition('_')[2]
                out[f'{block}attn.q.{kind}'], out[f'{block}attn.kv.{kind}'] = value[:C].clone(), value[C:].clone()
            elif name.startswith('ffn.layers.'):
                layer = 'fc1' if '.0.' in name else 'fc2'
                out[f'{block}mlp.{layer}.' + name.rpartition('.')[2]] = value.flatten(1) if value.dim() == 4 else value
            else:
                out[block + name.replace('attn.attn.out_proj', 'attn.proj')] = value
    return out


ALL = [
    pvt, pvt_v2, mmdet_pvt, swin, mmdet_swin, mmpretrain_swin, timm_pvt, timm_swin, timm_vit, mmpretrain_vit, dtn_vit,
    dtn_pvt, t2t, mmpretrain_t2t, levit, timm_levit, mmpretrain_levit,
]  # fmt: skip
