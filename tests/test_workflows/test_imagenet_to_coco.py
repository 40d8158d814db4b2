"""Trains a classifier with tools/train.py, and then a detector from its checkpoint, as a user does."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope
from PIL import Image

REPO = Path(__file__).parents[2]
ARCH = dict(base='tiny', depths=(1, 1, 1, 1), widths=(16, 32, 40, 64), mlp_ratios=(2, 2, 2, 2))

CONFIG = """
_base_ = '{repo}/configs/pvt/pvt-t-dtn_8xb128_in1k.py'
model = dict(backbone=dict(arch={arch}), head=dict(in_channels=64, num_classes=2),
             train_cfg=dict(_delete_=True))
data_preprocessor = dict(num_classes=2)
_pipeline = [dict(type='LoadImageFromFile'), dict(type='Resize', scale=64), dict(type='PackInputs')]
train_dataloader = dict(_delete_=True, batch_size=4, num_workers=0, sampler=dict(type='DefaultSampler', shuffle=True),
                        dataset=dict(type='CustomDataset', data_root='{data}', with_label=True, pipeline=_pipeline))
val_dataloader = val_evaluator = val_cfg = test_dataloader = test_evaluator = test_cfg = None
train_cfg = dict(max_epochs=2, val_interval=1000)
param_scheduler = []
"""


@pytest.fixture
def folder(tmp_path):
    rng = np.random.default_rng(0)
    for name, level in (('dark', 40), ('light', 200)):
        (tmp_path / 'data' / name).mkdir(parents=True)
        for i in range(6):
            noise = rng.integers(-30, 30, (50 + i, 70, 3)) + level
            Image.fromarray(noise.clip(0, 255).astype('uint8')).save(tmp_path / 'data' / name / f'{i}.png')
    return tmp_path


@pytest.mark.slow
def test_a_classifiers_checkpoint_fills_a_detectors_backbone(folder):
    config = folder / 'classifier.py'
    config.write_text(CONFIG.format(repo=REPO, arch=dict(ARCH, _delete_=True), data=folder / 'data'))
    done = subprocess.run(
        [sys.executable, REPO / 'tools' / 'train.py', config, '--work-dir', folder / 'work'],
        capture_output=True,
        text=True,
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    checkpoint = folder / 'work' / 'epoch_2.pth'
    trained = torch.load(checkpoint, weights_only=False)['state_dict']

    cfg = Config.fromfile(REPO / 'configs' / 'pvt' / 'retinanet_pvt-t-dtn_fpn_dtn-in1k_1x_coco.py')
    cfg.model.backbone.arch = ARCH
    cfg.model.backbone.init_cfg.checkpoint = str(checkpoint)
    cfg.model.neck.in_channels = [16, 32, 40, 64]
    init_default_scope(cfg.default_scope)
    detector = MODELS.build(cfg.model)
    fresh = {k: v.clone() for k, v in detector.backbone.state_dict().items()}
    detector.init_weights()
    loaded = detector.backbone.state_dict()
    for name, value in loaded.items():
        assert torch.equal(value, trained[f'backbone.{name}']), name
    changed = [name for name in loaded if not torch.equal(loaded[name], fresh[name])]
    assert any('mean_mix' in name for name in changed), 'training moved the lambdas'
    assert {k for k in trained if k.startswith('backbone.')} - {f'backbone.{k}' for k in loaded} == {
        f'backbone.{k}' for k in ('cls_token', 'cls_pos', 'norm.weight', 'norm.bias')
    }
