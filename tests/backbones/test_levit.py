"""Compares LeViTDTN with timm's and MMPretrain's LeViT with the same weights, and tests its options."""

import copy

import pytest
import timm
import torch
from mmengine.registry import init_default_scope
from mmpretrain.models.backbones import LeViT
from mmpretrain.models.heads import LeViTClsHead
from timm.utils import reparameterize_model
from torch import nn

from mmdtn.backbones import LeViTDTN
from mmdtn.checkpoints import from_mmpretrain_levit, from_timm_levit
from mmdtn.norms import DTN

from .helpers import randomised

SMALL = dict(widths=(16, 32, 48), key_width=8, num_heads=(2, 3, 4), depths=(1, 1, 1), drop_path_rate=0.0)


def same(got, want):
    """Compares relative to the largest value, because batch norms of small batches give values of all magnitudes."""
    scale = want.abs().max()
    torch.testing.assert_close(got / scale, want / scale, rtol=1e-5, atol=1e-5)


def timms(arch, **options):
    return timm.create_model(f'levit_{arch}', num_classes=0, **options)


def mmpretrains(arch):
    return LeViT(arch, out_indices=(0, 1, 2))


PEERS = {
    'timm': (timms, from_timm_levit, lambda peer, x: [x.mean((2, 3)) for x in peer.forward_intermediates(x)[1]]),
    'mmpretrain': (mmpretrains, from_mmpretrain_levit, lambda peer, x: [x.mean((2, 3)) for x in peer(x)]),
}


@pytest.mark.parametrize('training', [False, True], ids=['eval', 'train'])
@pytest.mark.parametrize('arch', ['128s', *(pytest.param(a, marks=pytest.mark.slow) for a in ('192', '256'))])
@pytest.mark.parametrize('whose', PEERS)
def test_without_norms_it_is_their_levit(whose, arch, training):
    build, convert, means_of_maps = PEERS[whose]
    peer, ours = randomised(build(arch)), LeViTDTN(arch, norm_cfg=None, out_type='featmap')
    ours.load_state_dict(convert(peer.state_dict()))
    for model in (peer, ours):
        model.train(training)
    x = torch.randn(3, 3, 224, 224)
    with torch.no_grad():
        for got, want in zip(ours(x), means_of_maps(peer, x), strict=True):
            same(got.mean((2, 3)), want)

    # Compare gradients in float64, because those of a bias in front of a batch norm are zero except for rounding.
    images = [x.double().requires_grad_() for _ in range(2)]
    for model in (peer, ours):
        model.double().train(training)  # called again because MMPretrain caches float32 biases in evaluation mode
    for maps in ([x.mean((2, 3)) for x in ours(images[0])], means_of_maps(peer, images[1])):
        sum((x * torch.linspace(-1, 1, x.numel()).view(x.shape)).sum() for x in maps).backward()
    torch.testing.assert_close(*(image.grad for image in images))
    theirs = convert({name: p.grad for name, p in peer.named_parameters()})
    assert theirs.keys() == dict(ours.named_parameters()).keys()
    for name, p in ours.named_parameters():
        if theirs[name] is None:
            assert whose == 'mmpretrain' and not training and name.endswith('attention_biases'), 'detached in theirs'
            continue
        torch.testing.assert_close(p.grad, theirs[name], msg=name)
    statistics = convert(peer.state_dict())
    for name, value in ours.state_dict().items():
        torch.testing.assert_close(value, statistics[name], rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize('size', [(128, 96), (96, 160)])
@torch.no_grad()
def test_another_size_is_timms(size):
    peer = randomised(timms('128s', img_size=size))
    ours = LeViTDTN('128s', norm_cfg=None, img_size=size)
    ours.load_state_dict(from_timm_levit(peer.state_dict()))
    x = torch.randn(2, 3, *size)
    for training in (False, True):
        same(ours.train(training)(x)[0], peer.train(training)(x))


@pytest.mark.parametrize(
    ('arch', 'two_heads', 'one_head'),
    [
        ('128s', 7_777_058, 7_391_290),
        ('128', 9_213_936, 8_828_168),
        ('192', 10_947_069, 10_561_301),
        ('256', 18_893_876, 18_379_852),
        ('384', 39_128_836, 38_358_300),
    ],
)
def test_parameter_counts_are_the_published_ones(arch, two_heads, one_head):
    init_default_scope('mmpretrain')
    with torch.device('meta'):
        backbone = LeViTDTN(arch, norm_cfg=None)
        peers = timm.create_model(f'levit_{arch}'), LeViT(arch)
        heads = [LeViTClsHead(1000, distillation=two, in_channels=backbone.num_features) for two in (True, False)]

    def count(*models):
        return sum(p.numel() for model in models for p in model.parameters())

    assert [count(backbone, head) for head in heads] == [two_heads, one_head]
    assert [count(peers[0]), count(peers[1], heads[1])] == [two_heads, one_head]


@pytest.mark.parametrize(
    ('arch', 'heads', 'layers', 'parameters'),
    [
        ('128s', (4, 4, 8), (5, 8, 9), 12_908),
        ('192', (3, 4, 6), (9, 10, 9), 16_733),
        ('256', (4, 6, 8), (9, 10, 9), 22_344),
    ],
)
def test_where_dtn_sits(arch, heads, layers, parameters):
    model = LeViTDTN(arch)
    found = {name: m for name, m in model.named_modules() if isinstance(m, DTN)}
    blocks = [(i, j) for i, stage in enumerate(model.stages) for j in range(len(stage.blocks))]
    assert {*found} == {f'stages.{i}.blocks.{j}.norm{n}' for i, j in blocks for n in (1, 2)}
    # The downsampling attention uses the width, heads and pool size of the previous stage.
    leading = {'stages.1.blocks.0.norm1': 0, 'stages.2.blocks.0.norm1': 1}
    widths = [m.num_features for m in (stage.blocks[-1].norm1 for stage in model.stages)]
    by_stage = [0, 0, 0]
    for name, m in found.items():
        stage = leading.get(name, int(name.split('.')[1]))
        by_stage[stage] += 1
        assert (m.num_features, m.num_heads, m.pool_size) == (widths[stage], heads[stage], (2, 1, 1)[stage]), name
    assert tuple(by_stage) == layers
    assert sum(p.numel() for m in found.values() for p in m.parameters()) == parameters
    said = LeViTDTN(dict(base=arch, norm_heads=(2, 2, 2)))
    assert {m.num_heads for m in said.modules() if isinstance(m, DTN)} == {2}


@pytest.mark.parametrize('norm_cfg', [None, dict(type='DTN'), dict(type='LN')], ids=str)
@torch.no_grad()
def test_batch_norms_fold_into_the_layers_before_them(norm_cfg):
    model = randomised(LeViTDTN('128s', norm_cfg=norm_cfg))
    x = torch.randn(2, 3, 224, 224)
    want = model(x)[0]
    folded = reparameterize_model(model)
    assert not any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in folded.modules())
    assert any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules())
    same(folded(x)[0], want)


def test_residual_branches_start_at_zero():
    """Without norms, the output depends only on the stem and the downsampling attention."""
    model = LeViTDTN(SMALL, norm_cfg=None, img_size=64, out_type='featmap', out_indices=(0,))
    model.init_weights()
    x = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(model(x)[0], model.patch_embed(x))
    assert all((stage.blocks[0].attn.attention_biases == 0).all() for stage in model.stages)


def test_evaluation_follows_new_weights_and_gives_gradients_again():
    """timm's attention caches its biases in evaluation mode."""
    model, other = (randomised(LeViTDTN(SMALL, img_size=64), seed) for seed in (0, 1))
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        model(x)
    model.load_state_dict(other.state_dict())
    torch.testing.assert_close(model(x), other(x))
    for _ in range(2):
        model(x)[0].sum().backward()
    assert all(stage.blocks[-1].attn.attention_biases.grad is not None for stage in model.stages)


def test_statistics_of_what_is_frozen_hold_still():
    model = LeViTDTN(SMALL, img_size=64, frozen_stages=1).train()
    before = copy.deepcopy(model.state_dict())
    model(torch.randn(2, 3, 64, 64))
    changed = {name for name, value in model.state_dict().items() if not value.equal(before[name])}
    assert changed and not any(name.startswith(('patch_embed.', 'stages.0.')) for name in changed)
    assert any(name.startswith('stages.1.') for name in changed)
    still = LeViTDTN(SMALL, img_size=64, norm_eval=True).train()
    before = copy.deepcopy(still.state_dict())
    still(torch.randn(2, 3, 64, 64))
    assert all(value.equal(before[name]) for name, value in still.state_dict().items())
    assert still.training and still.stages[0].training


@pytest.mark.parametrize(
    ('options', 'words'),
    [
        (dict(arch='128S'), "arch='128S'.*'128s'"),
        (dict(arch=dict(base='128s', dephts=(1, 1, 1))), 'unknown fields.*dephts.*depths'),
        (dict(arch=dict(base='128s', depths=(1, 1))), r'depths=\(1, 1\).*each of the 3 stages'),
        (dict(out_type='cls_token'), "out_type='cls_token'.*avg_featmap.*featmap"),
        (dict(out_indices=(3,)), '0 to 2'),
        (dict(pool_sizes=(2, 1)), r'pool_sizes=\(2, 1\).*each of the 3 stages'),
    ],
)
def test_options_that_make_no_model(options, words):
    with pytest.raises(ValueError, match=words):
        LeViTDTN(**options)


def test_images_of_another_size_are_refused_with_what_to_do():
    model = LeViTDTN(SMALL, img_size=(64, 96))
    with pytest.raises(ValueError, match=r'64 x 96.*96 x 64.*img_size=\(96, 64\)'):
        model(torch.randn(1, 3, 96, 64))
    assert LeViTDTN(SMALL, img_size=(96, 64)).eval()(torch.randn(1, 3, 96, 64))[0].shape == (1, 48)
    assert model.eval()(torch.randn(1, 3, 64, 90))[0].shape == (1, 48), 'the stem makes the same grid of it'
