"""Compares SwinDTN with three other Swin implementations with the same weights, and tests its options."""

import copy
import pickle

import pytest
import timm
import torch
from mmdet.models.backbones.swin import SwinTransformer as MMDetectionSwin
from mmdet.models.backbones.swin import swin_converter
from mmengine.logging import MMLogger
from mmengine.registry import MODELS
from mmpretrain.models.backbones import SwinTransformer as MMPretrainSwin
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from mmdtn.analysis import SavedBytes
from mmdtn.backbones import SwinDTN
from mmdtn.backbones.swin import ARCHS
from mmdtn.checkpoints import from_microsoft_swin, from_mmdet_swin, from_mmpretrain_swin, from_timm_swin
from mmdtn.norms import DTN
from mmdtn.norms.dtn import local_start

from .helpers import randomised

LN = dict(type='LN')
SMALL = dict(base='tiny', width=16, depths=(2, 2, 2, 2), num_heads=(1, 2, 4, 8), drop_path_rate=0.0)
# At these sizes, windows and patch merging need padding, or a map is smaller than a window.
SIZES = [(32, 32), (33, 47), (61, 83), (224, 224), (200, 304), (28, 260)]


@torch.no_grad()
def with_strong_tables(model):
    """Randomises biases to the magnitude of the scores, so that a misplaced bias changes the output."""
    for name, p in model.named_parameters():
        if name.endswith('relative_position_bias_table'):
            p.mul_(50)
    return model


@pytest.fixture(scope='module')
def mmdetections():
    peer = MMDetectionSwin(embed_dims=16, num_heads=(1, 2, 4, 8), depths=(2, 2, 2, 2))
    peer.init_weights()
    return with_strong_tables(randomised(peer))


@pytest.mark.parametrize('size', SIZES)
@torch.no_grad()
def test_layernorm_mode_is_mmdetections_swin(mmdetections, size):
    ours = SwinDTN(SMALL, norm_cfg=LN).eval()
    ours.load_state_dict(from_mmdet_swin(mmdetections.state_dict()))
    x = torch.randn(2, 3, *size)
    for got, want in zip(ours(x), mmdetections(x), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize('window', [1, 4])
@torch.no_grad()
def test_layernorm_mode_is_mmdetections_swin_with_other_windows(window):
    peer = MMDetectionSwin(embed_dims=16, num_heads=(1, 2, 4, 8), depths=(2, 2, 2, 2), window_size=window)
    with_strong_tables(randomised(peer))
    ours = SwinDTN(SMALL, norm_cfg=LN, window_size=window).eval()
    ours.load_state_dict(from_mmdet_swin(peer.state_dict()))
    x = torch.randn(2, 3, 61, 83)
    for got, want in zip(ours(x), peer(x), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(('arch', 'depths'), [('tiny', (2, 2, 6, 2)), ('small', (2, 2, 18, 2))])
@torch.no_grad()
def test_layernorm_mode_is_mmdetections_swin_at_full_size(arch, depths):
    peer = MMDetectionSwin(depths=depths)
    peer.init_weights()
    with_strong_tables(randomised(peer))
    ours = SwinDTN(arch, norm_cfg=LN).eval()
    ours.load_state_dict(from_mmdet_swin(peer.state_dict()))
    for size in ((224, 224), (200, 304)):
        x = torch.randn(1, 3, *size)
        for got, want in zip(ours(x), peer(x), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_layernorm_mode_has_mmdetections_gradients(mmdetections):
    ours = SwinDTN(SMALL, norm_cfg=LN).eval()
    ours.load_state_dict(from_mmdet_swin(mmdetections.state_dict()))
    x = torch.randn(2, 3, 61, 83)
    grads = []
    for model in (ours, mmdetections):
        sum((m * m.detach().cos()).sum() for m in model(x)).backward()
        grads.append({name: p.grad for name, p in model.named_parameters()})
        model.zero_grad()
    theirs = from_mmdet_swin(grads[1])
    assert grads[0].keys() == theirs.keys()
    for name, grad in grads[0].items():
        scale = theirs[name].abs().max()
        torch.testing.assert_close(grad / scale, theirs[name] / scale, rtol=1e-4, atol=1e-4, msg=name)


@pytest.mark.parametrize('size', [(224, 224), (224, 320), (448, 300)])
@torch.no_grad()
def test_layernorm_mode_is_mmpretrains_classifier(size):
    arch = dict(embed_dims=16, depths=(2, 2, 2, 2), num_heads=(1, 2, 4, 8))
    peer = with_strong_tables(randomised(MMPretrainSwin(arch)))
    ours = SwinDTN(SMALL, norm_cfg=LN, out_type='avg_featmap').eval()
    ours.load_state_dict(from_mmpretrain_swin(peer.state_dict()))
    x = torch.randn(2, 3, *size)
    (got,) = ours(x)
    torch.testing.assert_close(got, peer(x)[0].mean((2, 3)), rtol=1e-4, atol=1e-4)
    detector = SwinDTN(SMALL, norm_cfg=LN, out_indices=(3,)).eval()
    detector.load_state_dict(ours.state_dict())
    shifts_what_is_one_window = not torch.allclose(detector(x)[0].mean((2, 3)), got, rtol=1e-2, atol=1e-2)
    assert shifts_what_is_one_window == (min(size) == 224)


@pytest.mark.parametrize('layout', ['timm', 'microsoft'])
@torch.no_grad()
def test_layernorm_mode_is_timms_classifier(layout):
    options = dict(embed_dim=16, depths=(2, 2, 2, 2), num_heads=(1, 2, 4, 8), num_classes=10)
    peer = with_strong_tables(randomised(timm.create_model('swin_tiny_patch4_window7_224', **options)))
    ours = SwinDTN(SMALL, norm_cfg=LN, out_type='avg_featmap').eval()
    state = peer.state_dict()
    if layout == 'timm':
        state = from_timm_swin(state)
    else:
        old = microsofts(state)
        assert timm.models.swin_transformer.checkpoint_filter_fn(old, peer).keys() == state.keys(), 'timm reads it too'
        state = from_microsoft_swin(old)
    ours.load_state_dict(state)
    x = torch.randn(2, 3, 224, 224)
    torch.testing.assert_close(ours(x)[0], peer.forward_head(peer.forward_features(x), pre_logits=True))


def microsofts(state):
    """Converts timm's state dict to the layout of Microsoft's checkpoints."""
    old = {}
    for key, value in state.items():
        if '.downsample.' in key:
            key = f'layers.{int(key[7]) - 1}{key[8:]}'
        old[key.replace('head.fc.', 'head.')] = value
    return old | {'layers.0.blocks.1.attn_mask': torch.zeros(64, 49, 49)}


@torch.no_grad()
def test_microsofts_weights_are_what_mmdetection_makes_of_them(mmdetections):
    options = dict(embed_dim=16, depths=(2, 2, 2, 2), num_heads=(1, 2, 4, 8))
    state = microsofts(timm.create_model('swin_tiny_patch4_window7_224', **options).state_dict())
    state.pop('layers.0.blocks.1.attn_mask')
    through_mmdetection = swin_converter(
        {k.replace('norm.', 'norm3.') if k[:5] == 'norm.' else k: v for k, v in state.items()}
    )
    theirs = from_mmdet_swin({k.removeprefix('backbone.'): v for k, v in through_mmdetection.items()})
    ours = from_microsoft_swin(state)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_a_checkpoint_of_another_layout_is_refused():
    state = timm.create_model('swin_tiny_patch4_window7_224', embed_dim=16, num_heads=(1, 2, 4, 8)).state_dict()
    with pytest.raises(ValueError, match=r'layers\.3\.downsample.*Microsoft'):
        from_microsoft_swin(state)
    with pytest.raises(ValueError, match=r'layers\.0\.downsample.*timm'):
        from_timm_swin(microsofts(state))
    with pytest.raises(ValueError, match=r'layers\.0\..*MMDetection'):
        from_mmdet_swin(state)


PARAMETERS = dict(tiny=28.3, small=49.6, base=87.8)  # of the Swin paper with one decimal; its tables have 29, 50, 88


@pytest.mark.parametrize('norm', ['LN', 'DTN'])
@pytest.mark.parametrize('arch', ARCHS)
def test_parameter_counts_are_the_published_ones(arch, norm):
    with torch.device('meta'):
        model = SwinDTN(arch, norm_cfg=dict(type=norm), out_type='avg_featmap')
    count = sum(p.numel() for p in model.parameters()) + model.num_features * 1000 + 1000
    assert count / 1e6 == pytest.approx(PARAMETERS[arch], rel=0.01)


def test_where_dtn_sits():
    found = {name: (m.num_heads, m.pool_size) for name, m in SwinDTN('tiny').named_modules() if isinstance(m, DTN)}
    by_stage = [(3, 4), (6, 2), (12, 1), (24, 1)]
    depths = (2, 2, 6, 2)
    assert found == {
        f'stages.{i}.blocks.{j}.norm{n}': by_stage[i] for i in range(4) for j in range(depths[i]) for n in (1, 2)
    }
    apart = SwinDTN(dict(SMALL, norm_heads=(4, 4, 8, 8)), pool_sizes=(2, 2, 2, 2))
    assert [(s.blocks[0].attn.num_heads, s.blocks[0].norm2.num_heads) for s in apart.stages] == [
        (1, 4),
        (2, 4),
        (4, 8),
        (8, 8),
    ]
    assert {m.pool_size for m in apart.modules() if isinstance(m, DTN)} == {2}
    assert {m.eps for m in SwinDTN(SMALL, norm_cfg=LN).modules() if isinstance(m, nn.LayerNorm)} == {1e-5}


def test_init_weights_leaves_dtns_own_start_in_place():
    model = SwinDTN(SMALL)
    model.init_weights()
    layers = [m for m in model.modules() if isinstance(m, DTN)]
    assert len(layers) == 16
    for layer in layers:
        start = torch.tensor(local_start(layer.num_heads))
        assert torch.equal(layer.position[: len(start)], start)
        assert (layer.mean_mix == 0).all() and (layer.weight == 1).all()
    deviations = {
        name: p.std()
        for name, p in model.named_parameters()
        if name.endswith(('relative_position_bias_table', 'fc1.weight', 'reduction.weight')) and p.numel() > 1000
    }
    assert len(deviations) == 13 and all(0.015 < std < 0.025 for std in deviations.values()), deviations
    bound = 48**-0.5  # bound of torch's initialisation of a convolution over 3 x 4 x 4 values
    assert 0.9 * bound < model.patch_embed.proj.weight.abs().max() <= bound


@pytest.mark.parametrize('size', [(32, 32), (33, 47), (61, 83), (64, 200)])
def test_any_size_forward_and_backward(size):
    model = SwinDTN(SMALL)
    maps = model(torch.randn(2, 3, *size))
    sides = [(-(-size[0] // s), -(-size[1] // s)) for s in (4, 8, 16, 32)]
    assert [tuple(m.shape) for m in maps] == [(2, c, *hw) for c, hw in zip((16, 32, 64, 128), sides, strict=True)]
    assert all(m.is_contiguous() for m in maps)
    sum(m.square().sum() for m in maps).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters()), 'every parameter is used'


@pytest.mark.parametrize('options', [dict(out_type='avg_featmap', out_indices=(0, 1)), dict(out_indices=(1, 3))])
def test_outputs_that_are_not_asked_for_leave_no_unused_norm(options):
    model = SwinDTN(SMALL, **options)
    sum(out.square().sum() for out in model(torch.randn(2, 3, 64, 96))).backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize(
    'arch', ['tiny', *(pytest.param(arch, marks=pytest.mark.exhaustive) for arch in ('small', 'base'))]
)
def test_forward_on_fake_cuda_tensors(arch):
    with FakeTensorMode(), torch.device('cuda'):
        model = SwinDTN(arch)
        for size in ((224, 224), (200, 304)):
            maps = model(torch.randn(1, 3, *size))
            assert all(m.device.type == 'cuda' for m in maps)
            assert tuple(maps[-1].shape[2:]) == (-(-size[0] // 32), -(-size[1] // 32))


@torch.no_grad()
def test_a_new_size_leaves_nothing_behind():
    """The model caches no masks by image size, so no mask can be stale or on another device."""
    model = randomised(SwinDTN(SMALL, norm_cfg=LN))
    x = torch.randn(1, 3, 61, 83)
    tensors = {id(t) for t in (*model.parameters(), *model.buffers())}
    before = model(x)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        model(mode.from_tensor(x))
    with torch.inference_mode():
        model(torch.randn(1, 3, 96, 64))
    assert {id(t) for t in (*model.parameters(), *model.buffers())} == tensors
    for again in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        for got, want in zip(again(x), before, strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=0)
    assert model.state_dict().keys() == dict(model.named_parameters()).keys()
    with torch.enable_grad():
        model(x)[-1].sum().backward()


@torch.no_grad()
def test_half_precision_stays_close_and_finite():
    model = randomised(SwinDTN(SMALL, norm_cfg=LN))
    x = torch.randn(1, 3, 61, 83)
    with torch.autocast('cpu', torch.bfloat16):
        rough = model(x)
    for got, want in zip(rough, model(x), strict=True):
        torch.testing.assert_close(got.float(), want, rtol=0.1, atol=0.1)


def test_checkpointing_changes_nothing_but_memory():
    plain, again = SwinDTN(SMALL), SwinDTN(SMALL, with_cp=True)
    again.load_state_dict(plain.state_dict())
    x = torch.randn(1, 3, 64, 64)
    grads, sizes = [], []
    for model in (plain, again):
        with SavedBytes(model) as saved:
            loss = sum(m.sum() for m in model(x))
        loss.backward()
        grads.append([p.grad for p in model.parameters()])
        sizes.append(saved.total)
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)
    assert sizes[1] < sizes[0] / 3


def test_layernorm_mode_keeps_less_than_mmdetections_for_the_backward_pass():
    totals = []
    for model in (SwinDTN('tiny', norm_cfg=LN), MMDetectionSwin()):
        with SavedBytes(model) as saved:
            _maps = model(torch.randn(1, 3, 64, 96))
        totals.append(saved.total)
    assert totals[0] < 0.95 * totals[1]


def test_frozen_stages_hold_still():
    model = SwinDTN(SMALL, frozen_stages=2, drop_path_rate=0.5).train()
    trainable = {
        '.'.join(name.split('.')[: 1 + name.startswith('stages')])
        for name, p in model.named_parameters()
        if p.requires_grad
    }
    assert trainable == {'stages.2', 'stages.3', 'norm2', 'norm3'}
    assert not model.stages[1].training and not model.norm1.training and model.stages[2].training
    embedding = SwinDTN(SMALL, frozen_stages=0).train()
    still = {name for name, p in embedding.named_parameters() if not p.requires_grad}
    assert still == {f'patch_embed.{n}' for n in ('proj.weight', 'proj.bias', 'norm.weight', 'norm.bias')}


def test_norm_eval_holds_batch_statistics_still():
    class ChannelsLastBatchNorm(nn.BatchNorm1d):
        def forward(self, x):
            return super().forward(x.flatten(0, 2)).view(x.shape)

    MODELS.register_module('ChannelsLastBatchNorm', module=ChannelsLastBatchNorm, force=True)
    for norm_eval in (True, False):
        model = SwinDTN(SMALL, norm_cfg=dict(type='ChannelsLastBatchNorm'), norm_eval=norm_eval).train()
        model(torch.randn(2, 3, 32, 32))
        moved = model.stages[0].blocks[0].norm1.running_mean.abs().sum() > 0
        assert moved == (not norm_eval) and model.training


def test_pretrained_from_a_classifier_logs_what_it_did_not_find(tmp_path):
    classifier = SwinDTN(SMALL, out_type='avg_featmap')
    classifier.init_weights()
    state = {f'backbone.{k}': v for k, v in classifier.state_dict().items()} | {'head.fc.weight': torch.zeros(3, 128)}
    torch.save(dict(state_dict=state), tmp_path / 'classifier.pth')
    log = tmp_path / 'log.txt'
    MMLogger.get_instance('pretrained_swin', log_file=str(log))
    init_cfg = dict(type='Pretrained', checkpoint=str(tmp_path / 'classifier.pth'), prefix='backbone.')
    model = SwinDTN(SMALL, init_cfg=init_cfg)
    model.init_weights()
    for name, p in classifier.named_parameters():
        assert torch.equal(p, model.state_dict()[name]), name
    text = log.read_text()
    for i in range(3):
        assert f'norm{i}.weight: not loaded' in text
    assert 'dropped' not in text


@pytest.mark.parametrize(
    ('options', 'words'),
    [
        (dict(arch='huge'), "arch='huge'.*tiny.*base"),
        (dict(arch=dict(depths=(1, 1, 1, 1))), 'lacks.*width'),
        (dict(arch=dict(SMALL, dephts=1)), 'unknown.*dephts'),
        (dict(arch=dict(SMALL, depths=(1, 1))), r'depths=\(1, 1\)'),
        (dict(arch=dict(SMALL, num_heads=(3, 2, 4, 8)), norm_cfg=LN), '3 attention heads do not divide 16'),
        (dict(out_type='raw'), "out_type='raw'.*featmap.*avg_featmap"),
        (dict(out_indices=(4,)), '0 to 3'),
        (dict(pool_sizes=(4, 2)), r'pool_sizes=\(4, 2\).*4 stages'),
        (dict(window_size=0), 'window_size=0'),
    ],
)
def test_options_that_make_no_model(options, words):
    with pytest.raises(ValueError, match=words):
        SwinDTN(**options)
