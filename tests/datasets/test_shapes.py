"""The generated data sets can be read by pycocotools, MMDetection and MMPretrain."""

import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from mmengine.registry import DATASETS, init_default_scope
from PIL import Image
from pycocotools import mask as mask_utils
from pycocotools.coco import COCO

from mmdtn.datasets import CLASSES, METAINFO, draw_scene, shapes, write_classification, write_coco
from tools.dataset_converters import make_shapes

REPO = Path(__file__).parents[2]
CONVERTER = REPO / 'tools' / 'dataset_converters' / 'make_shapes.py'


def digests(root):
    return {
        str(f.relative_to(root)): hashlib.sha256(f.read_bytes()).hexdigest() for f in root.rglob('*') if f.is_file()
    }


@pytest.fixture(scope='module')
def data(tmp_path_factory):
    return write_coco(tmp_path_factory.mktemp('data') / 'shapes', train=60, val=12)


@pytest.fixture(params=['train', 'val'])
def coco(data, request, capsys):
    return COCO(data / 'annotations' / f'instances_{request.param}.json'), data / request.param


@pytest.mark.slow
def test_same_seed_same_bytes_in_another_process_and_place(tmp_path):
    data = write_coco(tmp_path / 'here', train=6, val=3)
    command = [sys.executable, CONVERTER, tmp_path / 'deeper' / 'copy', '--train', '6', '--val', '3']
    subprocess.run(command, check=True, cwd=tmp_path, env=dict(os.environ, PYTHONHASHSEED='7', OMP_NUM_THREADS='2'))
    assert digests(tmp_path / 'deeper' / 'copy') == digests(data)
    assert [p.name for p in (tmp_path / 'deeper').iterdir()] == ['copy'], 'nothing temporary is left'


def test_pictures_do_not_depend_on_how_many_there_are_and_differ_between_splits_and_seeds(data, tmp_path):
    few = write_coco(tmp_path / 'few', train=2, val=2)
    other = write_coco(tmp_path / 'other', train=2, val=2, seed=1)
    pictures = [root / split / '000002.jpg' for root in (few, other) for split in ('train', 'val')]
    assert pictures[0].read_bytes() == (data / 'train' / '000002.jpg').read_bytes()
    assert len({p.read_bytes() for p in pictures}) == 4


def test_annotations_keep_cocos_rules(coco):
    coco, folder = coco
    assert [c['name'] for c in coco.loadCats(coco.getCatIds())] == list(CLASSES)
    annotations = coco.dataset['annotations']
    assert len({a['id'] for a in annotations}) == len(annotations)
    assert sorted(p.name for p in folder.iterdir()) == sorted(i['file_name'] for i in coco.dataset['images'])
    for image in coco.dataset['images']:
        with Image.open(folder / image['file_name']) as picture:
            assert picture.size == (image['width'], image['height']) and picture.mode == 'RGB'
        masks = []
        for a in coco.imgToAnns[image['id']]:
            rle = coco.annToRLE(a)
            mask = mask_utils.decode(rle)
            assert mask.shape == (image['height'], image['width'])
            assert a['iscrowd'] == 0 and a['area'] == mask.sum() == mask_utils.area(rle) >= shapes.MIN_AREA
            assert a['bbox'] == mask_utils.toBbox(rle).tolist(), 'tight'
            masks.append(mask)
        assert np.sum(masks, 0).max() <= 1, 'of two objects over each other, one is visible'


@pytest.mark.parametrize('corner', [False, True])
def test_run_lengths_are_those_of_pycocotools(corner):
    mask = np.random.default_rng(0).random((7, 12)) < 0.4
    mask[0, 0] = corner
    rle = mask_utils.frPyObjects(dict(size=[7, 12], counts=shapes._run_lengths(mask)), 7, 12)
    assert np.array_equal(mask_utils.decode(rle), mask)
    assert rle == mask_utils.encode(np.asfortranarray(mask.astype(np.uint8)))


def test_variety(data):
    content = json.loads((data / 'annotations' / 'instances_train.json').read_text())
    shape = np.array([(i['height'], i['width']) for i in content['images']])
    assert (shape[:, 0] > shape[:, 1]).any() and (shape[:, 0] < shape[:, 1]).any()
    assert (shape % 2 == 1).any(0).all() and len(np.unique(shape, axis=0)) > 50
    assert shape.min() >= 128 and shape.max() <= 224
    area = np.array([a['area'] for a in content['annotations']])
    assert (area < 32**2).mean() > 0.2 and (area > 64**2).mean() > 0.05
    share = np.bincount([a['category_id'] for a in content['annotations']])[1:] / len(area)
    assert len(share) == len(CLASSES) and share.min() > 0.12
    boxes = {i['id']: [] for i in content['images']}
    for a in content['annotations']:
        boxes[a['image_id']].append(a['bbox'])
    overlapping = sum(
        (np.triu(mask_utils.iou(*2 * [np.array(b, float)], [0] * len(b)), 1) > 0.1).any() for b in boxes.values()
    )
    assert overlapping > len(boxes) / 3


def test_where_two_objects_meet_mask_and_picture_show_the_later():
    nearer = []
    triangle = CLASSES.index('triangle')
    for seed in range(40):
        _, _, (alone,) = draw_scene(np.random.default_rng(seed), 120, 120, [triangle], [70])
        picture, labels, masks = draw_scene(np.random.default_rng(seed), 120, 120, [triangle] * 2, [70, 60])
        if len(labels) < 2:
            continue
        shared = alone & masks[1]
        assert np.array_equal(masks[0], alone & ~masks[1])
        if shared.sum() > 100:
            in_shared, in_first, in_second = (picture[m].mean(0) for m in (shared, masks[0], masks[1] & ~shared))
            nearer.append(abs(in_shared - in_second).sum() < abs(in_shared - in_first).sum())
    assert len(nearer) > 8 and np.mean(nearer) > 0.9


def test_what_is_annotated_shows_enough_of_itself(monkeypatch):
    """Compares a scene with the same scene without the rule. Only objects with too small a visible part are missing."""
    rng = np.random.default_rng(5)
    labels, sizes = rng.integers(5, size=25), rng.uniform(15, 90, 25)
    _, kept, masks = draw_scene(np.random.default_rng(3), 120, 140, labels, sizes)
    whole = []
    original = shapes._Object.__init__

    def spy(self, *args):
        original(self, *args)
        whole.append(self.whole_area)

    monkeypatch.setattr(shapes._Object, '__init__', spy)
    monkeypatch.setattr(shapes, 'MIN_VISIBLE', -1)
    monkeypatch.setattr(shapes, 'MIN_AREA', -1)
    _, all_labels, all_masks = draw_scene(np.random.default_rng(3), 120, 140, labels, sizes)
    assert all_labels.tolist() == labels.tolist()
    enough = all_masks.sum((1, 2)) >= np.maximum(40, 0.5 * np.array(whole))
    assert 3 < enough.sum() < 20
    assert kept.tolist() == labels[enough].tolist()
    assert (masks | ~all_masks[enough]).all(), 'what is left shows as much as before, or more'


def test_the_mask_is_where_the_picture_changes():
    """Compares two scenes that differ in one object. Outside its mask they differ only in its smooth edge and noise."""
    nothing, _, _ = draw_scene(np.random.default_rng(1), 80, 90, [], [])
    for label in range(len(CLASSES)):
        picture, _, masks = draw_scene(np.random.default_rng(1), 80, 90, [label], [60])
        changed = abs(picture.astype(int) - nothing).max(2) > 35
        mask = masks[0]
        assert (changed & mask).sum() > 0.9 * mask.sum(), CLASSES[label]
        inner = ~mask & ~np.roll(mask, 1, 0) & ~np.roll(mask, -1, 0) & ~np.roll(mask, 1, 1) & ~np.roll(mask, -1, 1)
        assert not (changed & inner).any(), CLASSES[label]


def test_a_ring_has_a_hole_and_texture_classes_share_their_outline():
    rng = np.random.default_rng(2)
    _, _, masks = draw_scene(rng, 100, 100, [CLASSES.index('ring')], [70])
    entries = (np.diff(masks[0].astype(int), axis=1) == 1).sum(1)
    assert entries.max() == 2, 'a line across it enters, leaves for the hole and enters again'
    kinds = shapes._KINDS
    assert kinds['checked'][0] is kinds['striped'][0] and not set(kinds['checked'][1]) & set(kinds['striped'][1])
    assert len({kinds[c][0] for c in ('cross', 'ring', 'triangle')}) == 3
    assert len({kinds[c][1] for c in ('cross', 'ring', 'triangle')}) == 1
    masks = [
        draw_scene(np.random.default_rng(4), 100, 100, [CLASSES.index(c)], [70])[2] for c in ('checked', 'striped')
    ]
    assert np.array_equal(*masks)


def test_mmdetection_reads_it(data):
    init_default_scope('mmdet')
    pipeline = [dict(type='LoadImageFromFile'), dict(type='LoadAnnotations', with_bbox=True, with_mask=True)]
    common = dict(type='CocoDataset', data_root=str(data), pipeline=pipeline, metainfo=METAINFO)
    dataset = DATASETS.build(dict(common, ann_file='annotations/instances_train.json', data_prefix=dict(img='train/')))
    assert len(dataset) == 60 and dataset.metainfo['classes'] == CLASSES
    content = COCO(data / 'annotations' / 'instances_train.json')
    for i in (0, 7, 31):
        item = dataset[i]
        annotations = content.imgToAnns[item['img_id']]
        assert item['gt_bboxes_labels'].tolist() == [a['category_id'] - 1 for a in annotations]
        assert not item['gt_ignore_flags'].any()
        assert item['gt_masks'].areas.tolist() == [a['area'] for a in annotations]
        boxes = item['gt_masks'].get_bboxes('hbox').tensor.numpy()
        assert np.array_equal(boxes, item['gt_bboxes'].tensor.numpy()), 'tight, as MMDetection sees it'


def test_mmpretrain_reads_the_class_folders(tmp_path):
    root = write_classification(tmp_path / 'folders', train=15, val=5)
    init_default_scope('mmpretrain')
    dataset = DATASETS.build(dict(type='CustomDataset', data_root=str(root / 'train'), pipeline=[]))
    assert tuple(dataset.metainfo['classes']) == CLASSES
    assert np.bincount(dataset.get_gt_labels()).tolist() == [3] * 5
    assert len(list((root / 'val').rglob('*.jpg'))) == 5
    again = write_classification(tmp_path / 'again', train=15, val=5)
    assert digests(root) == digests(again)


def test_whole_data_is_kept_and_other_data_replaced(tmp_path, monkeypatch):
    root = write_coco(tmp_path / 'shapes', train=3, val=2)
    expected = digests(root)
    with monkeypatch.context() as patch:
        patch.setattr(shapes, 'draw_scene', None)
        write_coco(root, train=3, val=2)
    assert digests(root) == expected, 'kept, without drawing anything'
    (root / 'train' / '000002.jpg').unlink()
    write_coco(root, train=3, val=2)
    assert digests(root) == expected, 'made whole again'
    (root / 'annotations' / 'instances_val.json').unlink()
    write_coco(root, train=3, val=2)
    assert digests(root) == expected, 'with its annotations'
    write_coco(root, train=2, val=2)
    assert len(list((root / 'train').iterdir())) == 2
    assert [p.name for p in tmp_path.iterdir()] == ['shapes']


def test_a_crash_leaves_nothing_under_the_name(tmp_path, monkeypatch):
    monkeypatch.setattr(shapes, '_tight_box', lambda mask: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_coco(tmp_path / 'shapes', train=3, val=2)
    assert list(tmp_path.iterdir()) == []


def test_a_crash_keeps_what_was_there(tmp_path, monkeypatch):
    root = write_coco(tmp_path / 'shapes', train=3, val=2)
    expected = digests(root)
    monkeypatch.setattr(shapes, '_tight_box', lambda mask: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_coco(root, train=3, val=2, seed=1)
    assert digests(root) == expected and [p.name for p in tmp_path.iterdir()] == ['shapes']


def test_a_directory_of_something_else_is_left_alone(tmp_path, monkeypatch):
    (tmp_path / 'mine.txt').write_text('mine')
    with pytest.raises(FileExistsError, match=re.escape(str(tmp_path))):
        write_coco(tmp_path, train=1, val=1)
    monkeypatch.setattr(sys, 'argv', ['make_shapes.py', str(tmp_path)])
    with pytest.raises(SystemExit, match=re.escape(str(tmp_path))):
        make_shapes.main()
    assert [p.name for p in tmp_path.iterdir()] == ['mine.txt']


@pytest.mark.parametrize('wrong', [dict(train=0), dict(val=0), dict(sides=(20, 40)), dict(sides=(90, 60))])
def test_impossible_settings_are_refused(tmp_path, wrong):
    with pytest.raises(ValueError, match='32 pixels'):
        write_coco(tmp_path / 'shapes', **wrong)
    assert list(tmp_path.iterdir()) == []
