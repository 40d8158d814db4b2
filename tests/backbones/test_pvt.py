"""Compares PVTDTN with MMDetection's PVT and timm's PVTv2 with the same weights, and tests its options."""

import pytest
import timm
import torch
from mmdet.models.backbones.pvt import PyramidVisionTransformer
from mmengine.logging import MMLogger
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from mmdtn.backbones import PVTDTN
from mmdtn.backbones.pvt import ARCHS
from mmdtn.checkpoints import from_mmdet_pvt, from_timm_pvt_v2
from mmdtn.norms import DTN
from mmdtn.norms.dtn import local_start

from .helpers import randomised

LN = dict(type='LN')
SMALL = dict(base='tiny', depths=(1, 1, 1, 1), widths=(16, 32, 40, 64), mlp_ratios=(2, 2, 2, 2), drop_path_rate=0.0)


@pytest.mark.parametrize(
    ('arch', 'depths'), [('tiny', [2, 2, 2, 2]), pytest.param('small', [3, 4, 6, 3], marks=pytest.mark.slow)]
)
@torch.no_grad()
def test_layernorm_mode_is_mmdetections_pvt(arch, depths):
    peer = PyramidVisionTransformer(num_layers=depths)
    peer.init_weights()
    randomised(peer)
    ours = PVTDTN(arch, norm_cfg=LN, other_norm_cfg=dict(LN, eps=1e-6)).eval()
    ours.load_state_dict(from_mmdet_pvt(peer.state_dict()))
    for size in ((224, 224), (192, 320)):
        x = torch.randn(2, 3, *size)
        for got, want in zip(ours(x), peer(x), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize('arch', ['b0', pytest.param('b2', marks=pytest.mark.slow)])
@torch.no_grad()
def test_layernorm_mode_is_timms_pvt_v2(arch):
    peer = randomised(timm.create_model(f'pvt_v2_{arch}', features_only=True))
    whole = randomised(timm.create_model(f'pvt_v2_{arch}', num_classes=0))
    peer.load_state_dict({k.replace('stages.', 'stages_', 1): v for k, v in whole.state_dict().items()})
    ours = PVTDTN(arch, norm_cfg=LN).eval()
    ours.load_state_dict(from_timm_pvt_v2(whole.state_dict()))
    classifier = PVTDTN(arch, norm_cfg=LN, out_type='cls_token').eval()
    classifier.load_state_dict(ours.state_dict())
    for size in ((224, 224), (192, 320), (200, 304)):
        x = torch.randn(2, 3, *size)
        for got, want in zip(ours(x), peer(x), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(classifier(x)[0], whole(x), rtol=1e-4, atol=1e-4)


PARAMETERS = dict(tiny=13.2, small=24.5, medium=44.2, large=61.4, b0=3.7, b1=14.0, b2=25.4, b3=45.2, b4=62.6, b5=82.0)


@pytest.mark.parametrize('norm', ['LN', 'DTN'])
@pytest.mark.parametrize('arch', ARCHS)
def test_parameter_counts_are_the_published_ones(arch, norm):
    with torch.device('meta'):
        model = PVTDTN(arch, norm_cfg=dict(type=norm), out_type='cls_token')
    count = sum(p.numel() for p in model.parameters()) + model.num_features * 1000 + 1000
    assert count / 1e6 == pytest.approx(PARAMETERS[arch], rel=0.01)


def test_where_dtn_sits():
    found = {name: (m.num_heads, m.pool_size) for name, m in PVTDTN('tiny').named_modules() if isinstance(m, DTN)}
    by_stage = [(4, 4), (4, 2), (5, 1)]
    assert found == {f'stages.{i}.blocks.{j}.norm{n}': by_stage[i] for i in range(3) for j in range(2) for n in (1, 2)}
    assert [s.blocks[0].attn.num_heads for s in PVTDTN('tiny').stages] == [4, 4, 5, 8]
    assert [s.blocks[0].attn.num_heads for s in PVTDTN('tiny', norm_cfg=LN).stages] == [1, 2, 5, 8]
    apart = PVTDTN(dict(base='tiny', num_heads=(1, 2, 5, 8), norm_heads=(4, 4, 5, 8)))
    assert [(s.blocks[0].attn.num_heads, s.blocks[0].norm1.num_heads) for s in apart.stages[:3]] == [
        (1, 4),
        (2, 4),
        (5, 5),
    ]
    for arch in ('tiny', 'b0'):
        norms = {name: m.eps for name, m in PVTDTN(arch, norm_cfg=LN).named_modules() if isinstance(m, nn.LayerNorm)}
        near = {name for name in norms if name.endswith(('patch_embed.norm', 'attn.norm'))}
        assert norms == {name: 1e-5 if name in near else 1e-6 for name in norms} and len(near) == 10
    ported = PVTDTN('tiny', norm_cfg=LN, other_norm_cfg=dict(LN, eps=1e-6))
    assert {m.eps for m in ported.modules() if isinstance(m, nn.LayerNorm)} == {1e-6}


def test_init_weights_leaves_dtns_own_start_in_place():
    model = PVTDTN(SMALL)
    model.init_weights()
    layers = [m for m in model.modules() if isinstance(m, DTN)]
    assert len(layers) == 6
    for layer in layers:
        start = torch.tensor(local_start(layer.num_heads))
        assert torch.equal(layer.position[: len(start)], start)
        assert (layer.mean_mix == 0).all() and (layer.weight == 1).all()
    assert 0.01 < model.stages[0].pos_embed.std() < 0.03
    assert 0.01 < model.stages[3].blocks[0].mlp.fc1.weight.std() < 0.03


@pytest.mark.parametrize('arch', [SMALL, dict(SMALL, version=2)], ids=['v1', 'v2'])
@pytest.mark.parametrize('size', [(64, 64), (61, 83), (7, 130), (33, 31)])
def test_any_size_forward_and_backward(arch, size):
    model = PVTDTN(arch)
    maps = model(torch.randn(2, 3, *size))
    sides = [(-(-size[0] // s), -(-size[1] // s)) for s in (4, 8, 16, 32)]
    assert [tuple(m.shape) for m in maps] == [(2, c, *hw) for c, hw in zip((16, 32, 40, 64), sides, strict=True)]
    assert all(m.is_contiguous() for m in maps)
    sum(m.square().sum() for m in maps).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters()), 'every parameter is used'


def test_class_token_reaches_the_output_and_every_parameter_is_used():
    model = PVTDTN(SMALL, out_type='cls_token')
    model.init_weights()
    (out,) = model(torch.randn(2, 3, 64, 96))
    assert out.shape == (2, 64)
    out.square().sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize(
    'arch', [pytest.param(arch, marks=[] if arch in ('tiny', 'b0') else pytest.mark.exhaustive) for arch in ARCHS]
)
def test_forward_on_fake_cuda_tensors(arch):
    with FakeTensorMode(), torch.device('cuda'):
        model = PVTDTN(arch)
        for size in ((224, 224), (200, 304)):
            maps = model(torch.randn(1, 3, *size))
            assert all(m.device.type == 'cuda' for m in maps)
            assert tuple(maps[-1].shape[2:]) == (-(-size[0] // 32), -(-size[1] // 32))


def test_attention_keeps_no_matrix_of_all_pairs():
    model = PVTDTN(dict(SMALL, sr_ratios=(1, 1, 1, 1)))
    largest = 0

    def pack(t):
        nonlocal largest
        largest = max(largest, t.numel())
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        model(torch.randn(1, 3, 256, 256))
    assert largest < (64 * 64) ** 2 / 16


def test_frozen_stages_hold_still():
    model = PVTDTN(SMALL, frozen_stages=2).train()
    trainable = {name.split('.')[1] for name, p in model.named_parameters() if p.requires_grad}
    assert trainable == {'2', '3'}
    assert not model.stages[1].training and model.stages[2].training
    embedding = PVTDTN(SMALL, frozen_stages=0).train()
    still = {name for name, p in embedding.named_parameters() if not p.requires_grad}
    assert still == {
        'stages.0.pos_embed',
        *(f'stages.0.patch_embed.{n}' for n in ('proj.weight', 'proj.bias', 'norm.weight', 'norm.bias')),
    }


def test_pretrained_from_a_classifier_logs_what_it_did_not_find(tmp_path):
    classifier = PVTDTN(SMALL, out_type='cls_token')
    classifier.init_weights()
    state = {f'backbone.{k}': v for k, v in classifier.state_dict().items()} | {'head.fc.weight': torch.zeros(3, 64)}
    torch.save(dict(state_dict=state), tmp_path / 'classifier.pth')
    log = tmp_path / 'log.txt'
    MMLogger.get_instance('pretrained', log_file=str(log))
    init_cfg = dict(type='Pretrained', checkpoint=str(tmp_path / 'classifier.pth'), prefix='backbone.')
    model = PVTDTN(SMALL, init_cfg=init_cfg)
    model.init_weights()
    for name, p in model.named_parameters():
        assert torch.equal(p, classifier.state_dict()[name]), name
    text = log.read_text()
    for name in ('cls_token', 'cls_pos', 'norm.weight', 'norm.bias'):
        assert f'dropped {name}: the target has no such part' in text
    assert 'keeps its initial value' not in text
    with pytest.raises(ValueError, match=r"starts with 'nothing\.'"):
        PVTDTN(SMALL, init_cfg=dict(init_cfg, prefix='nothing.')).init_weights()


@pytest.mark.parametrize('norm', ['DTN', 'LN', 'RMSNorm'])
def test_builds_in_every_scope_with_any_normaliser_of_channels_last_maps(norm):
    import mmdet.registry
    import mmengine.registry
    import mmpretrain.registry

    if norm == 'RMSNorm' and 'RMSNorm' not in mmengine.registry.MODELS:

        @mmengine.registry.MODELS.register_module('RMSNorm')
        class Norm(nn.RMSNorm):
            def __init__(self, num_features):
                super().__init__(num_features)

    for package in (mmengine, mmdet, mmpretrain):
        model = package.registry.MODELS.build(dict(type='PVTDTN', arch=SMALL, norm_cfg=dict(type=norm)))
        assert model(torch.randn(1, 3, 32, 32))[0].shape == (1, 16, 8, 8)


@pytest.mark.parametrize(
    ('options', 'words'),
    [
        (dict(arch='huge'), "arch='huge'.*tiny.*b5"),
        (dict(arch=dict(depths=(1, 1, 1, 1))), 'lacks.*widths'),
        (dict(arch=dict(SMALL, dephts=1)), 'unknown.*dephts'),
        (dict(arch=dict(SMALL, depths=(1, 1))), r'depths=\(1, 1\)'),
        (dict(out_type='raw'), "out_type='raw'.*featmap.*cls_token"),
        (dict(out_indices=(4,)), '0 to 3'),
        (dict(out_type='cls_token', dtn_stages=(3,)), 'class token'),
    ],
)
def test_options_that_make_no_model(options, words):
    with pytest.raises(ValueError, match=words):
        PVTDTN(**options)
