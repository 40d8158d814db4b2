"""Fused models have the same outputs as the original models, at image sizes with and without padding."""

import copy

import pytest
import torch
from mmengine.registry import MODELS, init_default_scope
from timm.utils import reparameterize_model
from torch import nn

from mmdtn.norms import DTN, TokenBN
from mmdtn.surgery.fusion import fuse, norms_of

from .helpers import randomised
from .test_all import CASES, everywhere, images, small

OFFLINE: dict[str, dict] = dict(BN={}, UN=dict(warmup_iters=4), RepBN={}, PRepBN=dict(taper_iters=2), FeatureNorm={})
SIZES = [(64, 96), (50, 70), (20, 36)]  # whole windows, partial windows, and maps smaller than a reduction's kernel
ENDS = ['norm', *(f'norm{i}' for i in range(4)), *(f'stages.{i}.norm' for i in range(4))]


def trained(name, norm, steps=3, **options):
    """Returns a model in evaluation mode after some steps of SGD from weights of both signs."""
    torch.manual_seed(0)
    norms = {k: cfg | OFFLINE[norm] for k, cfg in everywhere(name, norm).items()}
    model = small(name, **norms | options)
    model.init_weights()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.02)
        for _, m in norms_of(model):
            weight = m.get_parameter('bn.weight' if hasattr(m, 'bn') else 'weight')
            weight.mul_(torch.where(torch.rand_like(weight) < 0.3, -1.0, 1.0))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        sum(out.square().mean() for out in model(images(name))).backward()
        optimizer.step()
    return model.eval()


def sizes(name):
    return [(64, 96), (50, 90)] if name.startswith('levit') else SIZES  # LeViT supports one grid size


@torch.no_grad()
def difference(one, other, size, dtype=torch.float):
    """Returns the largest difference relative to the largest output."""
    x = torch.randn(2, 3, *size, dtype=dtype)
    outs = zip(one(x), other(x), strict=True)
    return max(((a - b).abs().max() / a.abs().max()).item() for a, b in outs)


@pytest.mark.parametrize('norm', OFFLINE)
@pytest.mark.parametrize('name', CASES)
def test_a_fused_model_computes_the_same(name, norm):
    model = trained(name, norm)
    before = copy.deepcopy(model.state_dict())
    fused, outcomes = fuse(model)
    assert [o.name for o in outcomes] == [n for n, _ in norms_of(model)]
    assert {o.name for o in outcomes if not o.into} == {n for n, m in norms_of(fused)}
    assert {o.name for o in outcomes if not o.into} <= {*ENDS}
    for size in sizes(name):
        assert difference(model, fused, size) < 1e-5, size
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items()), 'the model itself is left alone'

    double, _ = fuse(model.double())
    for size in sizes(name):
        assert difference(model, double, size, torch.double) < 1e-12, size


@pytest.mark.parametrize('name', CASES)
def test_a_fused_model_loads_where_its_norms_are_said_to_be_fused(name):
    model = trained(name, 'BN')
    fused, outcomes = fuse(model)
    names = [o.name for o in outcomes if o.into]
    again = small(name, **everywhere(name, 'BN'), fused=names).eval()
    again.load_state_dict(fused.state_dict())
    assert difference(fused, again, sizes(name)[-1]) == 0
    twice, nothing = fuse(again)
    assert not any(o.into for o in nothing) and difference(again, twice, sizes(name)[-1]) < 1e-6


@pytest.mark.parametrize('name', ['pvt', 'swin', 'vit', 't2t'])
def test_timms_driver_fuses_the_blocks(name):
    model = trained(name, 'BN')
    fused = reparameterize_model(model)
    assert {n for n, _ in norms_of(fused)} == {n for n, _ in norms_of(fuse(model)[0])}
    assert difference(model, fused, SIZES[1]) < 1e-5
    with pytest.raises(ValueError, match=r'model\.eval\(\)'):
        reparameterize_model(model.train())


def test_a_model_without_norms_takes_a_fused_one():
    for name in ('pvt', 'vit-class-token'):
        fused, _ = fuse(trained(name, 'UN'))
        replaced = fused.get_submodule('norm') if name != 'pvt' else None
        without = small(name, **everywhere(name, 'Identity')).eval()
        if replaced is not None:
            without.norm = replaced  # a bare backbone has no classifier that can absorb its last norm
        without.load_state_dict(fused.state_dict())
        assert difference(fused, without, SIZES[2]) == 0


@pytest.mark.parametrize(('name', 'zeroed'), [('pvt', 'stages.1.blocks.0.norm1'), ('swin', 'stages.2.blocks.1.norm1')])
def test_a_channel_without_a_factor_keeps_the_norm_where_maps_are_padded(name, zeroed):
    model = trained(name, 'BN')
    with torch.no_grad():
        for block in ('norm1', 'norm2'):
            model.get_submodule(zeroed[:-5] + block).bn.weight[3] = 0
    fused, outcomes = fuse(model)
    kept = {o.name: o.why for o in outcomes if not o.into and o.name not in ENDS}
    assert [*kept] == [zeroed] and 'factor is 0 in channels [3]' in kept[zeroed]
    assert isinstance(fused.get_submodule(zeroed), TokenBN)
    for size in SIZES:
        assert difference(model, fused, size) < 1e-5, size


def test_the_published_levit_has_norms_to_fuse_too():
    model = randomised(small('levit', norm_cfg=None))
    fused, outcomes = fuse(model)
    assert outcomes and all(o.kind == 'BatchNorm2d' or o.kind == 'BatchNorm1d' for o in outcomes)
    assert norms_of(fused) == []
    for size in sizes('levit'):
        assert difference(model, fused, size) < 1e-5
    again = small('levit', norm_cfg=None, fused=[o.name for o in outcomes]).eval()
    again.load_state_dict(fused.state_dict())
    assert difference(fused, again, sizes('levit')[0]) == 0


def test_what_is_not_affine_stays_and_says_why():
    model = small('pvt', other_norm_cfg=dict(type='BN')).eval()
    fused, outcomes = fuse(model)
    why = {o.kind: o.why for o in outcomes if not o.into}
    assert why.keys() == {'DTN'} and why['DTN'].startswith('DTN ')
    assert {o.into.rpartition('.')[2] for o in outcomes if o.into} == {'proj', 'sr', 'attn', 'mlp'}
    assert [m for m in fused.modules() if isinstance(m, DTN)]
    assert difference(model, fused, SIZES[1]) < 1e-5

    young = small('vit', norm_cfg=dict(type='PRepBN', taper_iters=7))
    _, outcomes = fuse(young)
    assert not any(o.into for o in outcomes) and all('taper_iters=7' in o.why for o in outcomes if o.kind == 'PRepBN')
    with pytest.raises(ValueError, match='Linear has no backbone of mmdtn'):
        fuse(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"\['stages.0'\].*stages.0.patch_embed.norm"):
        small('pvt', fused=['stages.0'])


@pytest.mark.parametrize('name', ['vit-class-token', 'pvt-class-token', 'swin-mean'])
def test_a_linear_classifier_takes_in_the_last_norm(name):
    init_default_scope('mmpretrain')
    backbone = trained(name, 'FeatureNorm')
    head = dict(type='LinearClsHead', num_classes=7, in_channels=backbone.num_features)
    options = dict(CASES[name].options, type=type(backbone).__name__, **everywhere(name, 'FeatureNorm'))
    model = MODELS.build(dict(type='mmpretrain.ImageClassifier', backbone=options, head=head)).eval()
    model.backbone.load_state_dict(backbone.state_dict())
    fused, outcomes = fuse(model)
    assert outcomes[-1].into == 'head.fc' and all(o.into for o in outcomes) and norms_of(fused.backbone) == []
    x = torch.randn(2, 3, 50, 70)
    with torch.no_grad():
        want, got = (m(x, mode='tensor') for m in (model, fused))
    assert (want - got).abs().max() < 1e-5 * want.abs().max()
