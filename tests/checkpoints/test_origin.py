"""A checkpoint of this package can only be loaded by a model that computes the same outputs with it."""

import sys

import pytest
import torch
from mmengine.config import Config
from mmengine.registry import MODELS

from mmdtn.backbones import PVTDTN, SwinDTN, T2TViTDTN, ViTDTN
from mmdtn.checkpoints import backbone_settings, load
from tools.model_converters import convert

from . import published

WARM = dict(type='DTN', prenorm=False, eps=1e-6)


@pytest.fixture
def converted(tmp_path, monkeypatch):
    """Converts a published file with LayerNorm by the tool."""

    def run(file, name):
        torch.save(file, tmp_path / 'published.pth')
        out = tmp_path / 'converted.pth'
        arguments = ['convert.py', str(tmp_path / 'published.pth'), '--to', name, '--warm-start', '--out', str(out)]
        monkeypatch.setattr(sys, 'argv', arguments)
        convert.main()
        return str(out)

    return run


def start(backbone, checkpoint, **options):
    model = backbone(init_cfg=dict(type='Pretrained', checkpoint=checkpoint, prefix='backbone.'), **options)
    model.init_weights()


def test_heads_and_prenorm_of_pvt(converted, capsys):
    file = converted(published.pvt().file, 'tiny')
    said = "for backbone={'type': 'PVTDTN', 'arch': {'base': 'tiny', 'num_heads': (1, 2, 5, 8)"
    assert said in capsys.readouterr().out
    heads = dict(base='tiny', num_heads=(1, 2, 5, 8), norm_heads=(4, 4, 5, 8))
    start(PVTDTN, file, arch=heads, norm_cfg=WARM)
    with pytest.raises(ValueError, match=r'stages\.0\.blocks\.0\.attn .*1 heads.* 4; .*\d+ more'):
        start(PVTDTN, file, arch='tiny', norm_cfg=WARM)
    with pytest.raises(ValueError, match=r'prenorm=False.*, not DTN\((?!.*prenorm=False)'):
        start(PVTDTN, file, arch=heads, norm_cfg=dict(type='DTN'))


def test_the_class_token_of_vit(converted):
    file = converted(published.timm_vit().file, 't')
    start(ViTDTN, file, arch='t', norm_cfg=WARM, cls_from=0)
    with pytest.raises(ValueError, match='cls_from=0, not 10'):
        start(ViTDTN, file, arch='t', norm_cfg=WARM)


def test_a_training_checkpoint(tmp_path):
    """A checkpoint of MMEngine's runner contains the text of the whole config."""
    backbone = dict(type='SwinDTN', arch='tiny', norm_cfg=dict(type='DTN', pool_second_moment=False))
    cfg = Config(dict(model=dict(type='ImageClassifier', backbone=backbone), other=[1, (2,)], default_scope=None))
    weights = {f'backbone.{key}': value for key, value in SwinDTN('tiny', norm_cfg=WARM).state_dict().items()}
    torch.save(dict(meta=dict(cfg=cfg.pretty_text), state_dict=weights), tmp_path / 'epoch_1.pth')
    start(SwinDTN, str(tmp_path / 'epoch_1.pth'), arch='tiny', norm_cfg=backbone['norm_cfg'])
    with pytest.raises(ValueError, match=r'pool_second_moment=False.*, not DTN'):
        start(SwinDTN, str(tmp_path / 'epoch_1.pth'), arch='tiny', norm_cfg=dict(type='DTN'))
    # From LayerNorm to DTN is another thing.
    backbone['norm_cfg'] = plain = dict(type='LN')
    cfg = Config(dict(model=dict(type='ImageClassifier', backbone=backbone)))
    weights = {f'backbone.{key}': value for key, value in SwinDTN('tiny', norm_cfg=plain).state_dict().items()}
    torch.save(dict(meta=dict(cfg=cfg.pretty_text), state_dict=weights), tmp_path / 'epoch_1.pth')
    model = SwinDTN(
        'tiny',
        norm_cfg=dict(WARM, eps=1e-5),
        init_cfg=dict(type='Pretrained', checkpoint=str(tmp_path / 'epoch_1.pth'), warm_start=1.0),
    )
    model.init_weights()
    with pytest.raises(ValueError, match='eps=1e-05, not 1e-06'):
        start(SwinDTN, str(tmp_path / 'epoch_1.pth'), arch='tiny', norm_cfg=dict(plain, eps=1e-6))


def own(tmp_path, backbone):
    """Saves a checkpoint with the config of its backbone."""
    model = MODELS.build(backbone)
    model.init_weights()
    cfg = Config(dict(model=backbone)).pretty_text
    torch.save(dict(meta=dict(cfg=cfg), state_dict=model.state_dict()), tmp_path / 'own.pth')
    return dict(type='Pretrained', checkpoint=str(tmp_path / 'own.pth'))


def test_the_image_size_of_computed_positions(tmp_path):
    """Only the config determines the image size, because our files do not contain the table of T2T-ViT."""
    small = dict(arch=dict(base='7', width=32, depth=3, num_heads=2), norm_cfg=dict(type='LN'))
    init_cfg = own(tmp_path, dict(type='T2TViTDTN', img_size=96, **small))
    T2TViTDTN(img_size=96, init_cfg=init_cfg, **small).init_weights()
    T2TViTDTN(img_size=64, init_cfg=dict(init_cfg, resize=True), **small).init_weights()
    with pytest.raises(ValueError, match='6 x 6 tokens, not 4 x 4'):
        T2TViTDTN(img_size=64, init_cfg=init_cfg, **small).init_weights()


@pytest.mark.parametrize(
    ('before', 'after', 'words'),
    [
        (dict(type='BN'), dict(type='BN', eps=1e-3), r'norm1 is TokenBN\(.*not TokenBN\(24, eps=0\.001'),
        (dict(type='ScaleNorm'), dict(type='RMSNorm'), 'ScaleNorm.*not RMSNorm'),
        (dict(type='GN'), dict(type='GN', num_groups=2), 'TokenGN.*num_groups=3.*num_groups=2'),
        (dict(type='IN'), dict(type='LN'), 'TokenIN.*not LayerNorm'),
        (dict(type='DTN', mean_lambda=0.0), dict(type='DTN', mean_lambda=1.0), 'mean_lambda=0.0.*mean_lambda=1.0'),
        (dict(type='DTN'), dict(type='DTN', pool_second_moment=False), None),  # cells are tokens
        (dict(type='PowerNorm'), dict(type='PowerNorm', warmup_iters=3000, sync=False), None),
    ],
)
def test_other_norms(tmp_path, before, after, words):
    """Settings that only affect training may differ."""
    small = dict(arch=dict(width=24, depth=3, num_heads=3, mlp_ratio=1), img_size=64, patch_size=16)
    init_cfg = own(tmp_path, dict(type='ViTDTN', norm_cfg=before, **small))
    model = ViTDTN(norm_cfg=after, init_cfg=init_cfg, **small)
    if words is None:
        return model.init_weights()
    with pytest.raises(ValueError, match=words):
        model.init_weights()


@pytest.mark.parametrize('text', ["model = dict(type=print('run'))", 'model = [', 'a.b = 1', "model = 'no'", ''])
def test_a_config_is_read_as_data_or_not_at_all(tmp_path, text, capsys):
    torch.save(dict(meta=dict(cfg=text), state_dict=dict(a=torch.ones(1))), tmp_path / 'a.pth')
    assert backbone_settings(load(str(tmp_path / 'a.pth'))) is None
    assert 'run' not in capsys.readouterr().out
