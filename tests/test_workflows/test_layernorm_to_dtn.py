"""Converts a detector with LayerNorm to DTN without losing accuracy, and continues its training, as a user does."""

import sys

import pytest
import torch
from mmengine.config import Config
from mmengine.runner import Runner

from mmdtn.datasets.shapes import write_coco
from mmdtn.norms import DTN
from tools.model_converters import convert as command

CONFIG = 'configs/demo/mask-rcnn_pvt-dtn_shapes.py'


@pytest.fixture
def config(tmp_path, request):
    """Writes the config of the demo's detector with ``norm_cfg``, trained for ``iterations`` and tested on the same 8
    images.
    """
    write_coco(tmp_path / 'data', train=8, val=1)

    def make(name, norm_cfg, iterations, lr, load_from=None):
        cfg = Config.fromfile(request.config.rootpath / CONFIG)
        cfg.model.backbone.norm_cfg = norm_cfg
        annotations = 'annotations/instances_train.json'
        for loader in (cfg.train_dataloader, cfg.val_dataloader):
            loader.dataset.update(data_root=f'{tmp_path}/data/', ann_file=annotations, data_prefix=dict(img='train/'))
            resize = next(t for t in loader.dataset.pipeline if t.type == 'Resize')
            resize.scale = (128, 128)
        cfg.train_dataloader.batch_size = 4
        cfg.train_dataloader.sampler = dict(type='InfiniteSampler', shuffle=True)
        cfg.train_dataloader.pop('batch_sampler', None)
        cfg.test_dataloader = cfg.val_dataloader
        cfg.val_evaluator.ann_file = cfg.test_evaluator.ann_file = f'{tmp_path}/data/{annotations}'
        cfg.train_cfg = dict(type='IterBasedTrainLoop', max_iters=iterations, val_interval=iterations)
        cfg.param_scheduler = [
            dict(type='LinearLR', start_factor=0.01, by_epoch=False, end=30),
            dict(type='CosineAnnealingLR', by_epoch=False, T_max=iterations),
        ]
        cfg.optim_wrapper.optimizer.lr = lr
        cfg.default_hooks.checkpoint = dict(type='CheckpointHook', by_epoch=False, interval=iterations)
        cfg.work_dir, cfg.load_from = str(tmp_path / name), load_from
        cfg.dump(tmp_path / f'{name}.py')
        return cfg

    return make


@pytest.mark.slow
def test_a_layernorm_detector_becomes_one_with_dtn(config, tmp_path, monkeypatch, capsys):
    runner = Runner.from_cfg(config('before', dict(type='LN', eps=1e-6), iterations=240, lr=1e-3))
    before = runner.train()
    with_ln = runner.val_loop.run()['coco/bbox_mAP']
    assert with_ln > 0.2, 'there is something to lose'

    warm = dict(type='DTN', prenorm=False, eps=1e-6)
    after = config('after', warm, iterations=60, lr=3e-4, load_from=str(tmp_path / 'dtn.pth'))
    source = tmp_path / 'before' / 'iter_240.pth'
    arguments = [str(source), '--to', f'{tmp_path}/after.py', '--warm-start', '--out', f'{tmp_path}/dtn.pth']
    monkeypatch.setattr(sys, 'argv', ['convert.py', *arguments])
    command.main()
    assert 'dropped' not in capsys.readouterr().out
    converted = torch.load(tmp_path / 'dtn.pth', weights_only=True)['state_dict']
    assert before.state_dict().keys() < converted.keys(), 'necks and heads come along'

    runner = Runner.from_cfg(after)
    assert any(isinstance(m, DTN) for m in runner.model.modules())
    assert abs(runner.test()['coco/bbox_mAP'] - with_ln) <= 0.02
    runner = Runner.from_cfg(after)
    runner.train()
    assert runner.val_loop.run()['coco/bbox_mAP'] >= with_ln
