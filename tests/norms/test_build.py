"""From a norm_cfg to a module, by its class."""

import pytest
import torch
from mmcv.cnn.bricks.norm import build_norm_layer  # noqa: F401  # registers MM's channels-first norms under short names
from torch import nn

from mmdtn.backbones import PVTDTN, SwinDTN, ViTDTN
from mmdtn.norms import DTN, Place, build_norm

BACKBONES = {PVTDTN: 'tiny', SwinDTN: 'tiny', ViTDTN: 't'}


@pytest.mark.parametrize('kind', ['DTN', 'mmengine.DTN', DTN])
@pytest.mark.parametrize('backbone', BACKBONES)
def test_each_way_of_naming_a_type_builds_the_same_layers(backbone, kind):
    def layers(norm_cfg):
        return [repr(m) for m in backbone(BACKBONES[backbone], norm_cfg=norm_cfg).modules() if isinstance(m, DTN)]

    assert layers(dict(type=kind, prenorm=False)) == layers(dict(type='DTN', prenorm=False)) != []
    assert all('num_heads=' in layer for layer in layers(dict(type=kind)))


def test_a_norm_takes_from_its_place_what_its_config_leaves_out():
    place = Place(num_heads=4, pool_size=2, eps=1e-6)
    assert repr(build_norm(dict(type='DTN'), 64, place)) == 'DTN(64, num_heads=4, pool_size=2)'
    assert repr(build_norm(dict(type='DTN', num_heads=8), 64, place)) == 'DTN(64, num_heads=8, pool_size=2)'
    for kind in ('LN', 'mmengine.LN', nn.LayerNorm):
        assert build_norm(dict(type=kind), 64, place).eps == 1e-6
        assert build_norm(dict(type=kind, eps=1e-3), 64, place).eps == 1e-3


@pytest.mark.parametrize('kind', ['BN2d', 'IN2d', nn.BatchNorm2d, nn.GroupNorm, nn.InstanceNorm2d])
@pytest.mark.parametrize('backbone', BACKBONES)
def test_channels_first_norms_are_refused_when_the_model_is_built(backbone, kind):
    with pytest.raises(ValueError, match='channels last'):
        backbone(BACKBONES[backbone], norm_cfg=dict(type=kind))


def test_an_unknown_type_is_named():
    with pytest.raises((ValueError, KeyError), match='NoSuchNorm'):
        build_norm(dict(type='NoSuchNorm'), 64)


def test_configs_are_not_written_to():
    cfg = dict(type='DTN')
    build_norm(cfg, 64, Place(4))
    assert cfg == dict(type='DTN')
    assert build_norm(cfg, 64)(torch.randn(1, 2, 3, 64)).shape == (1, 2, 3, 64)
