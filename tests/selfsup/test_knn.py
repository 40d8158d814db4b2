"""k-NN against plain loops, and the tool on models of MMPretrain and of this package."""

import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from mmdtn.datasets import write_classification
from mmdtn.errors import UserError
from mmdtn.selfsup import Features, accuracy, neighbours
from mmdtn.selfsup.knn import image_vectors
from tests.training import in_two_processes
from tools.analysis_tools import knn
from tools.train import main as train

from .small import BACKBONE, HEAD


def features(number, classes=7, channels=16):
    """Classes that overlap, with the same centres in each call."""
    labels = torch.randint(classes, (number,))
    centres = torch.randn(classes, channels, generator=torch.Generator().manual_seed(1))
    return Features(F.normalize(centres[labels] + 2 * torch.randn(number, channels), dim=1), labels)


def one_after_the_other(queries, images, k, temperature):
    """Top-1 and top-5 in percent, by NumPy's sort and a loop over queries and neighbours."""
    right = []
    for vector, label in zip(queries.vectors.numpy(), queries.labels.numpy(), strict=True):
        similarity = images.vectors.numpy() @ vector
        votes = {}
        for i in np.argsort(-similarity)[:k]:
            name = int(images.labels[i])
            votes[name] = votes.get(name, 0) + np.exp(similarity[i] / temperature)
        ranking = sorted(votes, key=votes.get, reverse=True)
        right.append((ranking[0] == label, label in ranking[:5]))
    return 100 * np.mean(right, 0)


def test_the_accuracy_is_that_of_a_loop_over_all():
    images, queries = features(300), features(90)
    found = accuracy(queries, images, (200, 1, 10), temperature=0.07)
    assert list(found) == [1, 10, 200]
    for k, both in found.items():
        want = one_after_the_other(queries, images, k, 0.07)
        assert both[0] == pytest.approx(want[0]) and (k < 200 or both[1] == pytest.approx(want[1]))
    assert found[1][0] != found[200][0], 'else this test says little'


def test_neighbours_are_the_same_in_parts():
    """More queries and images than are compared at a time."""
    images, queries = F.normalize(torch.randn(66_000, 3), dim=1), F.normalize(torch.randn(1030, 3), dim=1)
    similarities, numbers = neighbours(queries, images, 5)
    some = [0, 1023, 1024, 1029]
    values, want = (queries[some] @ images.T).topk(5)
    torch.testing.assert_close(similarities[some], values)
    assert (numbers[some] == want).float().mean() > 0.9 and numbers.max() > 65_536
    torch.testing.assert_close((images[numbers] * queries[:, None]).sum(-1), similarities)


@pytest.mark.parametrize('k', [0, 31])
def test_the_number_of_neighbours_is_checked(k):
    with pytest.raises(UserError, match='30'):
        accuracy(features(5), features(30), (k,))


def test_one_vector_an_image():
    maps = torch.randn(2, 5, 3, 4)
    torch.testing.assert_close(image_vectors((torch.zeros(2, 9), maps)), maps.mean((2, 3)))
    assert torch.equal(image_vectors([maps[..., 0, 0]]), maps[..., 0, 0])
    with pytest.raises(UserError, match=r'\(2, 5, 3\)'):
        image_vectors((maps[..., 0],))


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


@pytest.mark.slow
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


@pytest.mark.slow
def test_pre_training_validates_by_neighbours_as_the_tool_does(tmp_path, data, capsys):
    config, checkpoint = trained(tmp_path, data, PRE_TRAINING.format(backbone=BACKBONE, head=HEAD))
    logs = torch.load(checkpoint, weights_only=False)['message_hub']['log_scalars']
    knn.main([str(config), str(checkpoint), '--k', '3', '--work-dir', str(tmp_path / 'knn')])
    (log,) = (tmp_path / 'work').glob('*/vis_data/scalars.json')
    (validated,) = re.findall(r'"accuracy/3-NN": ([\d.]+)', log.read_text())
    assert logs and said(capsys.readouterr().out)[3] == pytest.approx(float(validated), abs=0.01)


@pytest.mark.slow
def test_a_config_without_test_data_is_told_what_to_do(tmp_path, data):
    (tmp_path / 'config.py').write_text(DATA.format(data=data) + CLASSIFIER + 'del test_dataloader\n')
    (tmp_path / 'weights.pth').touch()
    with pytest.raises(SystemExit, match='--data'):
        knn.main([str(tmp_path / 'config.py'), str(tmp_path / 'weights.pth')])
