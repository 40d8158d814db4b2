"""T2TViTDTN against MMPretrain's T2T-ViT with the same weights, the performer against its formula, and options."""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from mmpretrain.models.backbones import T2T_ViT
from mmpretrain.models.utils import MultiheadAttention
from torch import nn

from mmdtn.backbones import T2TViTDTN
from mmdtn.backbones.t2t import ARCHS, TokenPerformer, sines
from mmdtn.checkpoints import from_mmpretrain_t2t, from_t2t
from mmdtn.norms import DTN

from .helpers import randomised

LN = dict(type='LN')
SMALL = dict(base='t-14', width=48, depth=4, num_heads=3)


def mmpretrains(width, depth, num_heads, **options):
    layers = dict(num_heads=num_heads, feedforward_channels=3 * width)
    peer = T2T_ViT(embed_dims=width, num_layers=depth, layer_cfgs=layers, **options)
    for layer in peer.modules():
        if isinstance(layer, MultiheadAttention):
            # MMPretrain 1.3.6 divides the scores by this number, with which T2T-ViT and MMPretrain before 1.0 multiply.
            scale = (layer.input_dims // layer.num_heads) ** -0.5
            layer.scaled_dot_product_attention = partial(F.scaled_dot_product_attention, scale=scale)
    return peer


def without_table(state):
    """Without the positions, which our model computes."""
    return {key: value for key, value in state.items() if key != 'pos_embed'}


@pytest.mark.parametrize('size', [(224, 224), (256, 192)])
@torch.no_grad()
def test_layernorm_mode_is_mmpretrains_t2t_vit(size):
    peer = randomised(mmpretrains(384, 14, 6))
    ours = T2TViTDTN('t-14', norm_cfg=LN).eval()
    ours.load_state_dict(without_table(from_mmpretrain_t2t(peer.state_dict())))
    x = torch.randn(1, 3, *size)
    torch.testing.assert_close(ours(x)[0], peer(x)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('size', [(224, 224), (65, 97)])
@torch.no_grad()
def test_maps_are_mmpretrains(size):
    peer = randomised(mmpretrains(48, 4, 3, out_type='featmap', out_indices=[1, 3]))
    ours = T2TViTDTN(SMALL, norm_cfg=LN, dtn_layers=4, cls_from=0, out_type='featmap', out_indices=(1, -1)).eval()
    ours.load_state_dict(without_table(from_mmpretrain_t2t(peer.state_dict())))
    x = torch.randn(2, 3, *size)
    for got, want in zip(ours(x), peer(x), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_layernorm_mode_has_mmpretrains_gradients():
    peer = randomised(mmpretrains(48, 4, 3))
    ours = T2TViTDTN(SMALL, norm_cfg=LN, dtn_layers=4).eval()
    ours.load_state_dict(without_table(from_mmpretrain_t2t(peer.state_dict())))
    images, grads = [torch.randn(2, 3, 65, 97, requires_grad=True)], []
    images.append(images[0].detach().clone().requires_grad_())
    for model, x in zip((ours, peer), images, strict=True):
        (out,) = model(x)
        (out * out.detach().cos()).sum().backward()
        grads.append({name: p.grad for name, p in model.named_parameters()})
    token = grads[1].pop('cls_token')
    theirs = from_mmpretrain_t2t(grads[1]) | dict(cls_token=token[:, None])
    assert grads[0].keys() == theirs.keys()
    for name, grad in grads[0].items() | {('image', images[0].grad)}:
        want = images[1].grad if name == 'image' else theirs[name]
        torch.testing.assert_close(grad / want.abs().max(), want / want.abs().max(), rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize(('arch', 'published'), [('12', 6_941_902), ('14', 21_545_550)])
def test_tensors_of_performers_are_as_many_as_published(arch, published):
    """With random features, the table of positions and a head of 1000 classes."""
    with torch.device('meta'):
        model = T2TViTDTN(arch, norm_cfg=LN)
    width, tensors = model.num_features, [*model.parameters(), *model.buffers()]
    assert sum(t.numel() for t in tensors) + width + 1000 * (width + 1) == published  # the token's row is added to it


@pytest.mark.parametrize(('arch', 'inside'), [('14-wide', 2), ('7', 5), ('10', 8), ('12', 10), ('t-14', 10)])
def test_a_class_token_behind_dtn_has_two_blocks_at_least(arch, inside):
    with torch.device('meta'):
        model = T2TViTDTN(arch)
        maps = T2TViTDTN(arch, out_type='featmap')
    assert model.cls_from == inside
    assert [isinstance(block.norm1, DTN) for block in model.blocks] == [i < inside for i in range(model.depth)]
    assert sum(isinstance(block.norm1, DTN) for block in maps.blocks) == min(10, model.depth)


@pytest.mark.parametrize(('arch', 'published'), [('t-14', 21_465_422), ('t-19', 39_084_686), ('t-24', 64_000_590)])
def test_parameter_counts_are_the_published_ones(arch, published):
    fields = {name: ARCHS[arch][name] for name in ('width', 'depth', 'num_heads')}
    with torch.device('meta'):
        models = [mmpretrains(**fields), *(T2TViTDTN(arch, norm_cfg=dict(type=norm)) for norm in ('LN', 'DTN'))]
    counts = [sum(p.numel() for p in m.parameters()) + 1000 * (fields['width'] + 1) for m in models]
    of_dtn = 20 * 5 * fields['num_heads']  # lambdas and coefficients of P
    assert counts == [published, published, published + of_dtn]


def test_where_dtn_sits_and_where_the_class_token_joins():
    model = T2TViTDTN('t-14')
    found = {name: (m.num_heads, m.pool_size) for name, m in model.named_modules() if isinstance(m, DTN)}
    assert found == {f'blocks.{i}.norm{n}': (6, 1) for i in range(10) for n in (1, 2)}
    assert {m.eps for m in model.modules() if isinstance(m, nn.LayerNorm)} == {1e-5}
    assert model.cls_from == 10 and T2TViTDTN('t-14', norm_cfg=LN).cls_from == 0


def test_the_position_table_is_neither_trained_nor_saved():
    model = T2TViTDTN(SMALL, dtn_layers=2)
    assert not any('pos_embed' in name for name in [*model.state_dict(), *dict(model.named_parameters())])
    table = sines(197, 48)
    assert torch.equal(model.pos_embed.flatten(1, 2)[0], table[1:])
    assert table[5, 6].item() == pytest.approx(math.sin(5 / 10000 ** (6 / 48)))
    assert table[5, 7].item() == pytest.approx(math.cos(5 / 10000 ** (6 / 48)))


def test_the_class_token_starts_at_its_place_in_the_table():
    torch.manual_seed(0)
    model = T2TViTDTN(SMALL, dtn_layers=2)
    model.init_weights()
    start = model.cls_token.flatten() - sines(1, 48)[0]
    assert 0.01 < start.std() < 0.03 and start.abs().max() < 0.1


@torch.no_grad()
def test_performers_weigh_values_by_products_of_random_features():
    """``o = v + B y + c`` and what follows, with the weights of all pairs written out."""
    layer = randomised(TokenPerformer(27, 64))
    assert torch.allclose(layer.features @ layer.features.T, 32 * torch.eye(32), atol=1e-4)
    x = torch.randn(2, 5, 7, 27)
    q, k, v = (F.linear(layer.norm1(x), layer.qkv.weight, layer.qkv.bias).flatten(1, 2)).split(64, -1)
    phi_q, phi_k = ((t @ layer.features.T - t.pow(2).sum(-1, keepdim=True) / 2).exp() for t in (q, k))
    weights = phi_q @ phi_k.transpose(1, 2) / 32
    out = v + layer.proj(weights / (weights.sum(-1, keepdim=True) + 1e-8) @ v)
    out = out + layer.fc2(F.gelu(layer.fc1(layer.norm2(out))))
    torch.testing.assert_close(layer(x).flatten(1, 2), out, rtol=1e-5, atol=1e-5)
    order = torch.randperm(35)
    moved = layer(x.flatten(1, 2)[:, order].view_as(x)).flatten(1, 2)
    torch.testing.assert_close(moved, out[:, order], rtol=1e-5, atol=1e-5)
    layer.train()
    assert not torch.equal(layer(x), layer(x)), 'published with dropout'
    with torch.autocast('cpu', torch.bfloat16):
        assert layer.attend(100 * q.bfloat16(), k.bfloat16(), v.bfloat16()).isfinite().all()


@torch.no_grad()
def test_performers_files_have_keys_in_front_of_queries():
    model = randomised(T2TViTDTN(dict(SMALL, performer=True), norm_cfg=LN, dtn_layers=4))
    theirs = dict(cls_token=model.cls_token[:, 0] - sines(1, 48), pos_embed=sines(197, 48)[None])
    for key, value in model.state_dict().items():
        if '.attention' in key:
            key = key.replace('.features', '.w').replace('.fc1', '.mlp.0').replace('.fc2', '.mlp.2')
            if '.qkv.' in key:
                q, k, v = value.chunk(3)
                key, value = key.replace('qkv', 'kqv'), torch.cat((k, q, v))
        elif '.attn.q.' in key:
            key, value = key.replace('.q.', '.qkv.'), torch.cat((value, model.state_dict()[key.replace('.q.', '.kv.')]))
        if key != 'cls_token' and '.kv.' not in key:
            theirs[key.replace('patch_embed.', 'tokens_to_token.')] = value
    ours = without_table(from_t2t(theirs))
    assert ours.keys() == model.state_dict().keys()
    for key, value in model.state_dict().items():
        torch.testing.assert_close(ours[key], value, msg=key, check_dtype=False)


@pytest.mark.parametrize('out_type', ['cls_token', 'avg_featmap', 'featmap'])
@pytest.mark.parametrize('size', [(64, 64), (61, 83), (7, 130)])
@pytest.mark.parametrize('performer', [False, True])
def test_any_size_forward_and_backward(size, out_type, performer):
    model = T2TViTDTN(dict(SMALL, performer=performer), dtn_layers=2, out_type=out_type, drop_path_rate=0.0)
    model.init_weights()
    (out,) = model(torch.randn(2, 3, *size))
    assert out.shape == ((2, 48, *model.patch_embed(torch.zeros(1, 3, *size)).shape[1:3])[: out.dim()])
    out.square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters()), 'every parameter is used'


def test_frozen_stages_hold_still():
    model = T2TViTDTN(dict(SMALL, performer=True), dtn_layers=2, frozen_stages=1).train()
    still = {'.'.join(name.split('.')[:2]) for name, p in model.named_parameters() if not p.requires_grad}
    assert still == {'patch_embed.attention1', 'patch_embed.attention2', 'patch_embed.project', 'blocks.0'}
    x = torch.randn(1, 3, 64, 64)
    assert torch.equal(model.patch_embed(x), model.patch_embed(x)), 'no dropout in what is frozen'


@pytest.mark.parametrize(
    ('options', 'words'),
    [
        (dict(arch='14-t'), "arch='14-t'.*'t-14'"),
        (dict(arch=dict(SMALL, dephts=1)), 'unknown fields.*dephts.*depth'),
        (dict(dtn_layers=14), 'cannot join before block 14.*avg_featmap'),
    ],
)
def test_options_that_make_no_model(options, words):
    with pytest.raises(ValueError, match=words):
        T2TViTDTN(**options)
