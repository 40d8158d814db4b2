"""tools/analysis_tools/knn.py on models of MMPretrain and of DINO, in one process and in two."""

import re

import pytest
import torch

from mmdtn.datasets import write_classification
from mmdtn.selfsup import Features
from tests.selfsup.small import BACKBONE, HEAD, one_after_the_other
from tests.training import in_two_processes
from tools.analysis_tools import knn
from tools.train import main as train

pytestmark = pytest.mark.slow

DATA = """
default_scope = 'mmpretrain'
custom_imports = dict(imports=['mmdtn', 'mmpretrain'])
_load = [dict(type='LoadImageFromFile'), dict(type='Resize', scale=(32, 32))]
_folder = dict(type='CustomDataset', data_root='{data}', with_label=True)
_test = [*_load, dict(type='PackInputs')]
_loader = dict(num_workers=0, batch_size=4, collate_fn=dict(type='default_collate'))
_in_order = dict(type='DefaultSampler', shuffle=False)
test_dataloader = dict(_loader, dataset=dict(_folder, data_prefix='val', pipeline=_test), sampler=_in_order)
optim_wrapper = dict(optimizer=dict(type='SGD', lr=0.1))
randomness = dict(seed=3)
log_level = 'ERROR'
"""
CLASSIFIER = """
model = dict(
    type='ImageClassifier', backbone=dict(type='ResNet', depth=18, base_channels=8, stem_channels=8),
    neck=dict(type='GlobalAveragePooling'), head=dict(type='LinearClsHead', num_classes=5, in_channels=64))
data_preprocessor = dict(mean=[120, 120, 120], std=[60, 60, 60], to_rgb=True)
train_dataloader = dict(_loader, dataset=dict(_folder, data_prefix='train', pipeline=_test),
                        sampler=dict(type='DefaultSampler', shuffle=True))
test_cfg = dict()
test_evaluator = dict(type='Accuracy')
train_cfg = dict(type='ResumableLoop', max_iters=1, val_interval=100)
default_hooks = dict(checkpoint=dict(type='CheckpointHook', by_epoch=False, interval=1))
"""
PRE_TRAINING = """
model = dict(type='DINO', backbone={backbone}, head={head})
data_preprocessor = dict(type='SelfSupDataPreprocessor', mean=[120, 120, 120], std=[60, 60, 60], to_rgb=True)
_crop = dict(type='RandomResizedCrop', scale=16)
_views = [*_load[:1], dict(type='MultiView', num_views=[2], transforms=[[_crop]]), dict(type='PackInputs')]
train_dataloader = dict(_loader, dataset=dict(_folder, data_prefix='train', pipeline=_views),
                        sampler=dict(type='DefaultSampler', shuffle=True))
val_dataloader = test_dataloader
val_cfg = dict(type='KNNLoop', ks=(3,), bank=dict(
    _loader, dataset=dict(_folder, data_prefix='train', pipeline=_test), sampler=_in_order))
val_evaluator = []
test_cfg = dict(val_cfg, stage='test')
test_evaluator = []
custom_hooks = [dict(type='DINOHook')]
train_cfg = dict(type='ResumableLoop', max_iters=2, val_interval=2)
default_hooks = dict(checkpoint=dict(type='CheckpointHook', by_epoch=False, interval=1))
"""


@pytest.fixture(scope='module')
def data(tmp_path_factory):
    return write_classification(tmp_path_factory.mktemp('knn') / 'data', train=21, val=11)


def trained(folder, data, more):
    (folder / 'config.py').write_text(DATA.format(data=data) + more)
    train([str(folder / 'config.py'), '--work-dir', str(folder / 'work'), '--as-written'])
    return folder / 'config.py', max((folder / 'work').glob('iter_*.pth'))


def said(out):
    return {int(k): float(top1) for k, top1 in re.findall(r'^(\d+)-NN: top-1 ([\d.]+)', out, re.M)}


def test_any_classifier_of_mmpretrain(tmp_path, data, capsys):
    config, checkpoint = trained(tmp_path, data, CLASSIFIER)
    knn.main([str(config), str(checkpoint), '--k', '1', '7', '--batch-size', '5', '--keep', str(tmp_path / 'f.pt')])
    found = said(capsys.readouterr().out)
    kept = torch.load(tmp_path / 'f.pt')
    images, queries = (Features(kept[f'{name}.vectors'], kept[f'{name}.labels']) for name in ('images', 'queries'))
    assert images.vectors.shape == (21, 64) and queries.vectors.shape == (11, 64)
    assert images.labels.tolist() == sorted(images.labels.tolist()), 'in the order of the dataset'
    torch.testing.assert_close(images.vectors.norm(dim=1), torch.ones(21))
    want = {k: one_after_the_other(queries, images, k, 0.07)[0] for k in (1, 7)}
    assert found == pytest.approx(want, abs=0.01)
    arguments = ('--k', 1, 7, '--work-dir', tmp_path / 'two')
    assert in_two_processes(knn.main, config, checkpoint, *arguments, cwd=tmp_path) == [0, 0]
    assert said((tmp_path / 'said_0.txt').read_text()) == found and said((tmp_path / 'said_1.txt').read_text()) == {}


def test_pre_training_validates_by_neighbours_as_the_tool_does(tmp_path, data, capsys):
    config, checkpoint = trained(tmp_path, data, PRE_TRAINING.format(backbone=BACKBONE, head=HEAD))
    logs = torch.load(checkpoint, weights_only=False)['message_hub']['log_scalars']
    knn.main([str(config), str(checkpoint), '--k', '3', '--work-dir', str(tmp_path / 'knn')])
    (log,) = (tmp_path / 'work').glob('*/vis_data/scalars.json')
    (validated,) = re.findall(r'"accuracy/3-NN": ([\d.]+)', log.read_text())
    assert logs and said(capsys.readouterr().out)[3] == pytest.approx(float(validated), abs=0.01)


def test_a_config_without_test_data_is_told_what_to_do(tmp_path, data):
    (tmp_path / 'config.py').write_text(DATA.format(data=data) + CLASSIFIER + 'del test_dataloader\n')
    (tmp_path / 'weights.pth').touch()
    with pytest.raises(SystemExit, match='--data'):
        knn.main([str(tmp_path / 'config.py'), str(tmp_path / 'weights.pth')])
