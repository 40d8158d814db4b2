"""Tests how tools/train.py and tools/test.py treat broken data and non-finite numbers."""

import json
import re

import pytest
import torch
from mmengine.fileio import load

from mmdtn.datasets import write_classification, write_coco
from tests.training import log_of, write_classifier, write_detector
from tools.test import main as evaluate
from tools.train import main as train


def break_images(folder, names):
    """Removes one image, empties one and truncates one, in this order."""
    (folder / names[0]).unlink()
    (folder / names[1]).write_bytes(b'')
    half = (folder / names[2]).read_bytes()
    (folder / names[2]).write_bytes(half[: len(half) // 2])


def annotations_of(data, images):
    content = load(data / 'annotations' / 'instances_val.json')
    return [a for a in content['annotations'] if a['image_id'] in images]


FAULTS = ('there is no such file', 'the file is empty', 'truncated')


@pytest.fixture
def detector(tmp_path):
    data = write_coco(tmp_path / 'coco', train=10, val=6, sides=(64, 80))
    return write_detector(tmp_path / 'detector.py', data)


@pytest.mark.slow
@pytest.mark.parametrize('workers', [0, 2])
def test_broken_images_are_left_out_counted_and_listed(tmp_path, detector, workers):
    data, work = tmp_path / 'coco', tmp_path / 'work'
    break_images(data / 'train', ['000002.jpg', '000004.jpg', '000007.jpg'])
    break_images(data / 'val', ['000001.jpg', '000003.jpg', '000006.jpg'])
    options = ['--cfg-options', f'train_dataloader.num_workers={workers}', 'train_cfg.max_epochs=3']
    train([str(detector), '--work-dir', str(work), *options])
    report = log_of(work).rpartition('images were skipped')
    assert report[0].endswith('6 ')
    listed = report[2].split('\n\n')[0]
    for split, numbers in (('train', (2, 4, 7)), ('val', (1, 3, 6))):
        for number, fault in zip(numbers, FAULTS, strict=True):
            assert re.search(rf'{split}/00000{number}\.jpg \(id {number}\): .*{fault}', listed), (split, number)
    assert (work / 'epoch_3.pth').exists()

    out = tmp_path / 'out.pkl'
    evaluate([str(detector), str(work / 'epoch_3.pth'), '--work-dir', str(tmp_path / 'test'), '--out', str(out)])
    assert [sample['img_id'] for sample in load(out)] == [2, 4, 5]
    log = log_of(tmp_path / 'test')
    missed = len(annotations_of(data, images=(1, 3, 6)))
    assert '3 of 6 evaluation images' in log and f'{missed} objects as missed' in log
    assert '3 images were skipped' in log


@pytest.mark.slow
def test_strict_stops_at_a_broken_image(tmp_path, detector):
    image = tmp_path / 'coco' / 'train' / '000005.jpg'
    image.write_bytes(image.read_bytes()[:400])
    options = ['--strict', '--work-dir', str(tmp_path / 'train'), '--cfg-options', 'train_dataloader.num_workers=1']
    with pytest.raises(SystemExit, match=rf'^error: {image} \(id 5\): [^\n]*(?i:truncated)[^\n]*$'):
        train([str(detector), *options])
    image.unlink()
    (tmp_path / 'coco' / 'val' / '000002.jpg').write_bytes(b'')
    with pytest.raises(SystemExit, match=r'1 images .*val/000002\.jpg \(id 2\): .*empty'):
        train([str(detector), '--strict', '--work-dir', str(tmp_path / 'work')])


def change_annotations(tmp_path, change, split='train'):
    path = tmp_path / 'coco' / 'annotations' / f'instances_{split}.json'
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    return path


@pytest.mark.slow
def test_faults_of_annotations_are_named_and_left_out(tmp_path, detector):
    def change(content):
        content['annotations'][0]['bbox'][2] = 0
        content['annotations'][1]['category_id'] = 99

    path = change_annotations(tmp_path, change)
    with pytest.raises(SystemExit) as stopped:
        train([str(detector), '--strict', '--work-dir', str(tmp_path / 'strict')])
    assert f'{path} has 2 faults:' in stopped.value.code
    assert re.search(r'annotation 1 of image 1 \(000001\.jpg\) is 0 x \d+ pixels', stopped.value.code)
    # mmengine distinguishes runs of a process by config and second, and would write this log into the folder above
    options = ['train_cfg.max_epochs=1', 'experiment_name=lenient']
    train([str(detector), '--work-dir', str(tmp_path / 'work'), '--cfg-options', *options])
    log = log_of(tmp_path / 'work')
    assert f'{path} has 2 faults:' in log and 'annotation 2 of image 1 (000001.jpg) has category 99' in log


@pytest.mark.slow
def test_annotations_that_mmdetection_cannot_read_are_left_out_of_training_and_evaluation(tmp_path, detector):
    def change(content):
        content['annotations'][0]['bbox'].pop()
        content['annotations'][2]['id'] = content['annotations'][1]['id']

    paths = [change_annotations(tmp_path, change, split) for split in ('train', 'val')]
    options = ['train_cfg.max_epochs=1', 'experiment_name=unreadable']
    train([str(detector), '--work-dir', str(tmp_path / 'work'), '--cfg-options', *options])
    log = log_of(tmp_path / 'work')
    for path in paths:
        assert f'{path} has 2 faults:' in log
        (copy,) = (tmp_path / 'work').rglob(path.name)
        original = json.loads(path.read_text())['annotations']
        assert json.loads(copy.read_text())['annotations'] == [original[1], *original[3:]]
    assert 'Evaluating bbox' in log


@pytest.mark.slow
def test_annotation_files_that_cannot_be_used_stop_the_run(tmp_path, detector):
    path = change_annotations(tmp_path, lambda content: content.update(images=[]))
    with pytest.raises(SystemExit, match=rf'error: {path} has no images'):
        train([str(detector), '--work-dir', str(tmp_path / 'work')])
    path.write_text('<html>')
    with pytest.raises(SystemExit, match=rf'error: {path} is not JSON: .*line 1'):
        train([str(detector), '--work-dir', str(tmp_path / 'work')])
    path.write_text('[]')
    with pytest.raises(SystemExit, match=rf'error: {path} is a list'):
        train([str(detector), '--work-dir', str(tmp_path / 'work')])


NAN = """
_train['pipeline'].insert(2, dict(type='tests.engine.spoil.Spoil', name='{name}'))
default_hooks = dict(logger=dict(interval=1), checkpoint=dict(by_epoch=False, interval=1))
"""


@pytest.mark.slow
def test_nan_names_iteration_image_and_layer(tmp_path):
    data = write_classification(tmp_path / 'classes', train=20, val=5)
    picked = sorted((data / 'train').rglob('*.jpg'))[13]
    config = write_classifier(tmp_path / 'classifier.py', data, NAN.format(name=picked.name))
    with pytest.raises(SystemExit) as stopped:
        train([str(config), '--work-dir', str(tmp_path / 'work')])
    message = stopped.value.code
    assert '\n' not in message and str(picked) in message
    assert 'data_preprocessor (ClsDataPreprocessor), whose input was not finite' in message
    iteration = int(re.search(r'in iteration (\d+)', message)[1])
    saved = list((tmp_path / 'work').glob('*.pth'))
    assert len(saved) == iteration - 1
    for path in saved:
        assert all(weight.isfinite().all() for weight in torch.load(path, weights_only=False)['state_dict'].values())


@pytest.mark.slow
def test_amp_on_the_cpu_trains_fifty_steps(tmp_path, detector):
    work = tmp_path / 'work'
    options = ['train_cfg.max_epochs=10', 'train_cfg.val_interval=100', 'default_hooks.checkpoint.interval=10']
    detector.write_text(detector.read_text() + "\ncustom_hooks = [dict(type='tests.engine.spoil.SeeDtypes')]\n")
    options.append('optim_wrapper.optimizer.lr=0.001')
    train([str(detector), '--amp', '--work-dir', str(work), '--cfg-options', *options])
    losses = [float(loss) for loss in re.findall(r'Epoch\(train\).* loss: (\S+)', log_of(work))]
    assert len(losses) == 50 and all(torch.tensor(losses).isfinite())
    assert sum(losses[-10:]) < 0.9 * sum(losses[:10]), 'and it learns'
    weights = torch.load(work / 'epoch_10.pth', weights_only=False)
    assert all(w.isfinite().all() and w.dtype != torch.bfloat16 for w in weights['state_dict'].values())
    assert 'SeeDtypes: convolution torch.bfloat16, weight torch.float32' in log_of(work)
