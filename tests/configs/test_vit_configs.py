"""Tests the configs for ViT on CIFAR at 224 pixels and the values that they log."""

import json
from pathlib import Path

import pytest
import torch
from mmengine.registry import MODELS

from tests.training import run_tool

from .helpers import load

ROOT = Path(__file__).parents[2] / 'configs' / 'vit'


def test_cifar_at_224_px_has_the_flags_of_the_study():
    cfg = load(ROOT / 'vit-b_b128_cifar10-224.py')
    with torch.device('meta'):
        model = MODELS.build(cfg.model)
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(86e6, rel=0.01)
    optimizer = cfg.optim_wrapper.optimizer
    assert dict(optimizer) == dict(type='SGD', lr=0.01, momentum=0.9, weight_decay=5e-5)
    assert cfg.train_dataloader.batch_size == 128 and cfg.train_cfg.max_epochs == 300
    (schedule,) = cfg.param_scheduler
    assert (schedule.type, schedule.T_max, schedule.eta_min) == ('CosineAnnealingLR', 300, 0.01 * optimizer.lr)
    crops = [[t.type for t in loader.dataset.pipeline] for loader in (cfg.train_dataloader, cfg.val_dataloader)]
    assert crops == [['RandomResizedCrop', 'RandomFlip', 'PackInputs'], ['ResizeEdge', 'CenterCrop', 'PackInputs']]
    assert cfg.default_hooks.checkpoint.interval == 50


@pytest.mark.slow
def test_cifar_at_224_px_logs_loss_and_accuracy_of_training_and_test(tmp_path):
    """Trains a smaller model on generated images with all other settings of the config."""
    from mmdtn.datasets import write_classification

    data = write_classification(tmp_path / 'classes', train=6, val=4)
    loader = 'dict(batch_size=3, num_workers=0, persistent_workers=False, dataset=dict(_delete_=True, {}))'
    folder = "type='CustomDataset', data_root='{}', data_prefix='{}', pipeline=[dict(type='LoadImageFromFile'), *{}]"
    lines = [f"_base_ = '{ROOT}/vit-b-featurenorm_b128_cifar10-224.py'"]
    lines += ['model = dict(backbone=dict(arch=dict(_delete_=True, width=24, depth=11, num_heads=3, mlp_ratio=1)),']
    lines += ['             head=dict(in_channels=24))']
    for split, prefix, pipeline in (('train', 'train', 'train_transforms'), ('val', 'val', 'test_transforms')):
        of_folder = folder.format(data, prefix, f'_base_.{pipeline}')
        lines.append(f'{split}_dataloader = {loader.format(of_folder)}')
    lines += ['train_cfg = dict(max_epochs=2)', 'default_hooks = dict(checkpoint=dict(interval=2))']
    (tmp_path / 'small.py').write_text('\n'.join(lines) + '\n')
    run_tool('train.py', tmp_path / 'small.py', '--work-dir', tmp_path / 'work', cwd=tmp_path)
    (scalars,) = tmp_path.glob('work/*/vis_data/scalars.json')
    seen = [json.loads(line) for line in scalars.read_text().splitlines()]
    keys = {'loss', 'accuracy_top-1', 'epoch_loss', 'epoch_accuracy'}
    tested = [line for line in seen if 'loss/cross_entropy' in line]
    assert [line['step'] for line in tested] == [1, 2] and all('accuracy/top1' in line for line in tested)
    assert [*tmp_path.glob('work/*/vis_data/events.out.tfevents*')]
    trained = [line for line in seen if 'lr' in line]
    assert all(keys <= line.keys() for line in trained) and len(trained) >= 2, seen
