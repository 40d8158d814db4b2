"""Two processes over gloo give the same results as one process with all the data."""

import re

import pytest
import torch
from mmengine.fileio import load

from mmdtn.datasets import write_classification, write_coco
from tests.training import (
    free_port,
    in_two_processes,
    log_of,
    metrics,
    run_tool,
    write_classifier,
    write_detector,
)
from tools.test import main as evaluate
from tools.train import main as train

# Runs five steps, without the features that have to differ: each process has its own drop paths and its own padding.
# SGD is used because Adam turns round-off into full steps where a gradient is zero, as for the bias of attention keys.
# The steps are small because steps of 0.05 magnify round-off in convolutions before a GroupNorm, to 1e-4 and more on
# some CPUs.
SAME = """
custom_imports = dict(imports=['mmdtn', 'tests.engine.save_steps'])
custom_hooks = [dict(type='SaveFirstGradients')]
model['backbone']['drop_path_rate'] = 0
optim_wrapper = dict(
    optimizer=dict(_delete_=True, type='SGD', lr=0.01, momentum=0.9, weight_decay=0.01), clip_grad=None)
train_cfg = dict(max_epochs=1)
param_scheduler = []
find_unused_parameters = False
"""
# ATSS averages the number of positive anchors over processes. MMDetection's RetinaNet uses the number of each process.
DETECTOR = """
_square = dict(type='Resize', scale=(96, 96), keep_ratio=False)
_train.update(pipeline=[*_load, _square, dict(type='RandomFlip', prob=0.5), dict(type='PackDetInputs')])
train_dataloader.update(dataset=_train, batch_sampler=None)
val_dataloader = val_evaluator = val_cfg = test_dataloader = test_evaluator = test_cfg = None
model.update(
    bbox_head=dict(
        _delete_=True, type='ATSSHead', num_classes=5, in_channels=32, stacked_convs=1, feat_channels=32,
        anchor_generator=dict(type='AnchorGenerator', ratios=[1.0], octave_base_scale=8, scales_per_octave=1,
                              strides=[8, 16, 32, 64, 128]),
        loss_cls=dict(type='FocalLoss'), loss_bbox=dict(type='GIoULoss')),
    train_cfg=dict(_delete_=True, assigner=dict(type='ATSSAssigner', topk=9), allowed_border=-1, pos_weight=-1))
"""


@pytest.fixture(scope='module')
def data(tmp_path_factory):
    root = tmp_path_factory.mktemp('data')
    return dict(
        classifier=write_classification(root / 'classes', train=20, val=10),
        detector=write_coco(root / 'coco', train=20, val=2, sides=(64, 96)),
    )


def config(folder, kind, data, more=''):
    write = dict(classifier=write_classifier, detector=write_detector)[kind]
    return write(folder / f'{kind}.py', data[kind], more)


@pytest.mark.slow
@pytest.mark.parametrize('kind', ['classifier', 'detector'])
def test_same_gradients_and_weights_as_one_process(tmp_path, data, kind):
    path = config(tmp_path, kind, data, SAME + (DETECTOR if kind == 'detector' else ''))
    train([str(path), '--work-dir', str(tmp_path / 'one'), '--cfg-options', 'train_dataloader.batch_size=4'])
    arguments = (path, '--work-dir', 'two', '--cfg-options', 'train_dataloader.batch_size=2')
    if kind == 'detector':
        assert in_two_processes(train, *arguments, cwd=tmp_path) == [0, 0]
    else:
        run_tool('dist_train.sh', path, 2, *arguments[1:], cwd=tmp_path, PORT=free_port())

    one, two, other = (
        torch.load(tmp_path / name) for name in ('one/gradients_0.pth', 'two/gradients_0.pth', 'two/gradients_1.pth')
    )
    assert one.keys() == two.keys()
    assert max(gradient.abs().max() for gradient in one.values()) > 0.01
    for name, gradient in one.items():
        torch.testing.assert_close(two[name], gradient, rtol=0, atol=1e-5, msg=name)
        assert torch.equal(two[name], other[name]), name

    one, two = (torch.load(tmp_path / name / 'epoch_1.pth', weights_only=False) for name in ('one', 'two'))
    assert one['meta']['iter'] == two['meta']['iter'] == 5
    for name, weight in one['state_dict'].items():
        torch.testing.assert_close(two['state_dict'][name], weight, rtol=0, atol=2e-5, msg=name)


@pytest.fixture(scope='module')
def trained(tmp_path_factory, data):
    """Returns a classifier's config, and its checkpoint after an epoch in one process."""
    folder = tmp_path_factory.mktemp('trained')
    path = config(folder, 'classifier', data)
    train([str(path), '--work-dir', str(folder / 'work'), '--cfg-options', 'train_cfg.max_epochs=1'])
    return path, folder / 'work' / 'epoch_1.pth'


@pytest.mark.slow
def test_evaluation_in_two_processes_is_that_of_one(tmp_path, trained):
    path, checkpoint = trained
    evaluate([str(path), str(checkpoint), '--work-dir', f'{tmp_path}/one', '--out', f'{tmp_path}/one.pkl'])
    arguments = (path, checkpoint, '--work-dir', 'two', '--out', 'two.pkl')
    assert in_two_processes(evaluate, *arguments, cwd=tmp_path) == [0, 0]
    assert metrics(tmp_path / 'one')['accuracy/top1'] == metrics(tmp_path / 'two')['accuracy/top1']
    one, two = (load(tmp_path / name) for name in ('one.pkl', 'two.pkl'))
    assert [sample['img_path'] for sample in one] == [sample['img_path'] for sample in two]
    for sample, other in zip(one, two, strict=True):
        torch.testing.assert_close(sample['pred_score'], other['pred_score'])


@pytest.mark.slow
def test_fsdp_saves_what_one_process_loads(tmp_path, data, trained):
    more = """
runner_type = 'FlexibleRunner'
strategy = dict(type='FSDPStrategy', state_dict_cfg='full')
train_cfg = dict(max_epochs=1)
"""
    path = config(tmp_path, 'classifier', data, more)
    assert in_two_processes(train, path, '--work-dir', 'sharded', cwd=tmp_path) == [0, 0]
    expected = log_of(tmp_path / 'sharded').rpartition('accuracy/top1: ')[2].split()[0]
    plain, of_one_process = trained
    evaluate([str(plain), str(tmp_path / 'sharded' / 'epoch_1.pth'), '--work-dir', str(tmp_path / 'tested')])
    tested = log_of(tmp_path / 'tested')
    assert 'missing keys' not in tested and 'unexpected key' not in tested
    assert tested.rpartition('accuracy/top1: ')[2].split()[0] == expected

    # The sharded checkpoint has all weights with their full shapes, and training has changed some of them.
    sharded, whole = (
        torch.load(file, weights_only=False)['state_dict']
        for file in (tmp_path / 'sharded' / 'epoch_1.pth', of_one_process)
    )
    assert {name: value.shape for name, value in sharded.items()} == {n: value.shape for n, value in whole.items()}
    moved = [name for name in whole if not torch.equal(sharded[name], whole[name])]
    assert moved


@pytest.mark.slow
def test_faults_on_one_process_are_dealt_with_by_all(tmp_path):
    data = write_classification(tmp_path / 'classes', train=20, val=9)
    images = {split: sorted((data / split).rglob('*.jpg')) for split in ('train', 'val')}
    images['train'][3].write_bytes(b'')
    images['val'][2].unlink()  # the files of both processes are listed and evaluated once
    path = write_classifier(tmp_path / 'classifier.py', data, f"_val['ann_file'] = '{tmp_path}/val.txt'\n")
    (tmp_path / 'val.txt').write_text(''.join(f'{p.relative_to(data / "val")} 0\n' for p in images['val']))
    epoch = ('--cfg-options', 'train_cfg.max_epochs=1')
    assert in_two_processes(train, path, '--work-dir', 'work', *epoch, cwd=tmp_path) == [0, 0]
    log = log_of(tmp_path / 'work')
    assert log.count('2 images were skipped') == 1
    assert f'{images["train"][3]} (id ' in log and f'{images["val"][2]} (id 2): there is no such file' in log
    arguments = (path, 'work/epoch_1.pth', '--out', 'out.pkl')
    assert in_two_processes(evaluate, *arguments, cwd=tmp_path) == [0, 0]
    assert sorted(sample['img_path'] for sample in load(tmp_path / 'out.pkl')) == [
        str(p) for p in images['val'] if p.exists()
    ]

    spoil = f"_train['pipeline'].insert(2, dict(type='tests.engine.spoil.Spoil', name='{images['train'][5].name}'))\n"
    path.write_text(path.read_text() + spoil)
    exits = in_two_processes(train, path, '--work-dir', 'nan', cwd=tmp_path)
    found = [bool(re.match(r'error: the loss is nan in iteration \d', str(code))) for code in exits]
    assert sorted(found) == [False, True] and str(images['train'][5]) in exits[found.index(True)]
    assert re.match(r'error: the loss is not finite in a process other than \d', exits[found.index(False)])
