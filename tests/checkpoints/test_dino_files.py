"""Loads files of facebookresearch/dino, and checkpoints of this package's DINO training."""

import argparse
import sys

import pytest
import timm
import torch
from mmengine.config import Config
from mmengine.registry import MODELS

from mmdtn import checkpoints
from mmdtn.backbones import ViTDTN
from mmdtn.norms import DTN
from tests.backbones.helpers import randomised
from tests.selfsup.small import BACKBONE, HEAD, dino
from tools.model_converters import convert as command

OPTIONS = dict(arch='t', norm_cfg=dict(type='LN'), cls_from=0)


@pytest.fixture(scope='module')
def facebooks(tmp_path_factory):
    """Returns a ViT, the file of its backbone and its full checkpoint, with timm's names."""
    folder = tmp_path_factory.mktemp('dino')
    peer = randomised(timm.create_model('vit_tiny_patch16_224', num_classes=0))
    torch.save(peer.state_dict(), folder / 'pretrain.pth')
    head = {'mlp.0.weight': torch.randn(8, 192), 'last_layer.weight_g': torch.ones(4, 1)}
    student = {f'module.backbone.{key}': torch.zeros_like(value) for key, value in peer.state_dict().items()}
    teacher = {f'backbone.{key}': value for key, value in peer.state_dict().items()}
    whole = dict(
        student=student | {f'module.head.{key}': value for key, value in head.items()},
        teacher=teacher | {f'head.{key}': value for key, value in head.items()},
        optimizer=dict(state={}, param_groups=[dict(lr=1e-3)]),
        epoch=100,
        args=argparse.Namespace(arch='vit_tiny', out_dim=65536),
        dino_loss=dict(center=torch.zeros(1, 4)),
    )
    torch.save(whole, folder / 'full_checkpoint.pth')
    return peer, folder


@pytest.mark.parametrize('name', ['pretrain.pth', 'full_checkpoint.pth'])
@torch.no_grad()
def test_published_files_compute_what_the_teacher_did(facebooks, name):
    peer, folder = facebooks
    model = ViTDTN(**OPTIONS, init_cfg=dict(type='Pretrained', checkpoint=str(folder / name)))
    model.init_weights()
    x = torch.randn(2, 3, 224, 224)
    torch.testing.assert_close(model.eval()(x)[0], peer(x), rtol=1e-4, atol=1e-4)
    norm_cfg = dict(type='DTN', prenorm=False, eps=1e-6)
    start = dict(type='Pretrained', checkpoint=str(folder / name), warm_start=1.0)
    warm = ViTDTN('t', norm_cfg=norm_cfg, cls_from=0, init_cfg=start)
    warm.init_weights()
    assert any(isinstance(m, DTN) for m in warm.modules())
    torch.testing.assert_close(warm.eval()(x)[0], peer(x), rtol=1e-3, atol=1e-3)


@pytest.fixture
def ours(tmp_path):
    """Returns a checkpoint of a training, in which the teacher differs from the student."""
    model = dino()
    with torch.no_grad():
        for parameter in model.teacher.module.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    cfg = Config(dict(model=dict(type='DINO', backbone=BACKBONE, head=HEAD)))
    torch.save(dict(state_dict=model.state_dict(), meta=dict(cfg=cfg.pretty_text)), tmp_path / 'epoch_1.pth')
    cfg.dump(tmp_path / 'config.py')
    return model, tmp_path


@pytest.mark.parametrize('prefix', [dict(prefix='teacher.module.backbone.'), {}], ids=['prefix', 'found'])
def test_a_pre_trained_backbone_starts_a_classifier_and_a_detector(ours, prefix):
    model, folder = ours
    start = dict(type='Pretrained', checkpoint=str(folder / 'epoch_1.pth'), **prefix)
    x = torch.randn(2, 3, 16, 16)
    for out_type in ('cls_token', 'featmap'):
        backbone = MODELS.build(dict(BACKBONE, out_type=out_type, init_cfg=start))
        backbone.init_weights()
        for name, value in backbone.state_dict().items():
            assert torch.equal(value, model.teacher.module.backbone.state_dict()[name]), name
        if out_type == 'cls_token':
            assert torch.equal(backbone.eval()(x)[0], model.eval()(x)[0])
    with pytest.raises(checkpoints.UnfitFile, match='cls_from=2'):
        MODELS.build(dict(BACKBONE, cls_from=0, init_cfg=start)).init_weights()


def test_convert_writes_the_backbone_alone(ours, monkeypatch):
    model, folder = ours
    arguments = [folder / 'epoch_1.pth', '--to', folder / 'config.py', '--out', folder / 'plain.pth']
    monkeypatch.setattr(sys, 'argv', ['convert.py', *map(str, arguments)])
    command.main()
    state = torch.load(folder / 'plain.pth')['state_dict']
    want = model.teacher.module.backbone.state_dict()
    assert state.keys() == {f'backbone.{key}' for key in want}
    assert all(torch.equal(state[f'backbone.{key}'], value) for key, value in want.items())
