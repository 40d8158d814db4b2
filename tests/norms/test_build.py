"""From a norm_cfg to a module, by its class."""

import pytest
import timm
import torch
from mmcv.cnn.bricks.norm import build_norm_layer  # noqa: F401  # registers MM's channels-first norms under short names
from mmengine.registry import MODELS
from mmpretrain.models.utils import LayerNorm2d
from torch import nn

import mmdtn.backbones
from mmdtn.norms import DTN, Place, TokenBN, build_norm
from mmdtn.surgery.conversion import convert_norms

from ..backbones.test_all import CASES

NORMS = ['BN', 'DTN', 'DyT', 'Derf', 'FeatureNorm', 'GN', 'IN', 'LN', 'PRepBN', 'PowerNorm', 'RMSNorm', 'RepBN', 'SN']
NORMS += ['ScaleNorm', 'UN']
BACKBONES = ['pvt', 'swin', 'vit', 't2t', 'levit']


def test_a_norm_cfg_that_is_no_dict():
    with pytest.raises(TypeError, match=r"norm_cfg=\"dict\(type='LN'\)\" should be a dict .* norm_cfg\.type=DTN"):
        build_norm("dict(type='LN')", 8)


def test_no_backbone_is_left_out():
    assert {CASES[name].backbone.__name__ for name in BACKBONES} == {*mmdtn.backbones.__all__}


def build(name, **norm_cfg):
    """A small backbone, as a config names it."""
    case = CASES[name]
    return MODELS.build(dict(case.options, type=case.backbone.__name__, norm_cfg=norm_cfg))


@pytest.mark.parametrize('kind', ['DTN', 'mmengine.DTN', DTN])
@pytest.mark.parametrize('name', BACKBONES)
def test_each_way_of_naming_a_type_builds_the_same_layers(name, kind):
    def layers(**norm_cfg):
        return [repr(m) for m in build(name, **norm_cfg).modules() if isinstance(m, DTN)]

    assert layers(type=kind, prenorm=False) == layers(type='DTN', prenorm=False) != []
    assert any('num_heads=' in layer for layer in layers(type=kind))


def test_a_norm_takes_from_its_place_what_its_config_leaves_out():
    place = Place(num_heads=4, pool_size=2, eps=1e-6)
    assert repr(build_norm(dict(type='DTN'), 64, place)) == 'DTN(64, num_heads=4, pool_size=2)'
    assert repr(build_norm(dict(type='DTN', num_heads=8), 64, place)) == 'DTN(64, num_heads=8, pool_size=2)'
    for kind in ('LN', 'mmengine.LN', nn.LayerNorm):
        assert build_norm(dict(type=kind), 64, place).eps == 1e-6
        assert build_norm(dict(type=kind, eps=1e-3), 64, place).eps == 1e-3


@pytest.mark.parametrize('kind', ['BN2d', 'IN2d', nn.BatchNorm2d, nn.GroupNorm, nn.InstanceNorm2d])
@pytest.mark.parametrize('name', BACKBONES)
def test_channels_first_norms_are_refused_when_the_model_is_built(name, kind):
    with pytest.raises(ValueError, match='channels last'):
        build(name, type=kind)


class Broadcast(nn.Module):
    """Of the second dimension; no shape of an input is an error."""

    def __init__(self, channels):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))

    def forward(self, x):
        return self.weight[:, None, None] * x


class Last(Broadcast):
    def forward(self, x):
        return self.weight * x


@pytest.mark.parametrize('kind', [LayerNorm2d, Broadcast])
def test_other_peoples_channels_first_norms_are_refused_too(kind):
    with pytest.raises(ValueError, match=rf'{kind.__name__} takes B x C x H x W, .* channels last'):
        build_norm(dict(type=kind), 8)
    assert build_norm(dict(type=Last), 8).training
    with torch.device('meta'):
        assert build_norm(dict(type=Last), 8).weight.device.type == 'meta'


def test_an_unknown_type_is_named():
    with pytest.raises((ValueError, KeyError), match='NoSuchNorm'):
        build_norm(dict(type='NoSuchNorm'), 64)


def test_configs_are_not_written_to():
    cfg = dict(type='DTN')
    build_norm(cfg, 64, Place(4))
    assert cfg == dict(type='DTN')
    assert build_norm(cfg, 64)(torch.randn(1, 2, 3, 64)).shape == (1, 2, 3, 64)


def test_settings_of_older_versions_mean_what_they_meant():
    old = dict(type='DTN', compiled=True, mix_mean=False, var_lambda=0.25)
    assert repr(build_norm(old, 8)) == 'DTN(8, mean_lambda=1.0, var_lambda=0.25)'
    assert repr(build_norm(dict(type='DTN', compiled=None, mix_mean=True), 8)) == 'DTN(8)'
    (maps,) = MODELS.build(dict(type='ViTDTN', arch='t', norm_cfg=old))(torch.zeros(1, 3, 32, 32))
    assert maps.shape == (1, 192)


@pytest.mark.parametrize('kind', NORMS)
def test_requires_grad_is_accepted_for_every_norm(kind):
    """MMDetection's configs have ``dict(type='BN', requires_grad=True)`` in most places."""
    free = build_norm(dict(type=kind, requires_grad=True), 8)
    frozen = build_norm(dict(type=kind, requires_grad=False), 8)
    assert repr(free) == repr(frozen) == repr(build_norm(dict(type=kind), 8))
    assert all(parameter.requires_grad for parameter in free.parameters())
    assert not any(parameter.requires_grad for parameter in frozen.parameters())


def test_requires_grad_reaches_the_norms_of_a_backbone_and_of_a_converted_model():
    backbone = build('pvt', type='DTN', requires_grad=False)
    model = nn.Sequential(timm.create_model('vit_tiny_patch16_224', depth=1))
    convert_norms(model, norm_cfg=dict(type='DTN', prenorm=False, requires_grad=False))
    for norms in ([m for m in built.modules() if isinstance(m, DTN)] for built in (backbone, model)):
        assert norms and not any(parameter.requires_grad for norm in norms for parameter in norm.parameters())
    with pytest.raises(ValueError, match="requires_grad='no'"):
        build_norm(dict(type='DTN', requires_grad='no'), 8)


@pytest.mark.parametrize('eps', [-1, float('nan'), float('inf'), '1e-5', True, None])
@pytest.mark.parametrize('kind', NORMS)
def test_an_eps_that_gives_no_root_is_refused_when_the_norm_is_built(kind, eps):
    with pytest.raises(ValueError, match=f'eps={eps!r}'):
        build_norm(dict(type=kind, eps=eps), 8)


@pytest.mark.parametrize(
    ('kind', 'wrong'),
    [
        ('DTN', dict(prenorm='no')),
        ('DTN', dict(affine=1)),
        ('DTN', dict(mean_lambda='a')),
        ('DTN', dict(var_lambda=True)),
        ('BN', dict(momentum='0.1')),
        ('PowerNorm', dict(warmup_iters=1.5)),
        ('SN', dict(batch='False')),
        ('UN', dict(window='4')),
        ('LN', dict(elementwise_affine='no')),
    ],
)
def test_values_of_a_wrong_type_are_refused_when_the_norm_is_built(kind, wrong):
    ((name, value),) = wrong.items()
    with pytest.raises(ValueError, match=f'{name}={value!r}'):
        build_norm(dict(type=kind, **wrong), 8)


@pytest.mark.parametrize('norm', [DTN, TokenBN])
def test_norms_built_without_a_norm_cfg_check_eps_too(norm):
    with pytest.raises(ValueError, match='eps=-1'):
        norm(8, eps=-1)
    assert norm(8, eps=0).eps == 0
    assert build_norm(dict(type='BN', momentum=None), 8).momentum is None
