"""predict.py prepares images exactly as the test pipelines do."""

import cv2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mmengine.config import Config, ConfigDict
from mmengine.dataset import Compose
from mmengine.registry import init_default_scope
from PIL import Image
from pycocotools.mask import decode, frPyObjects

from mmdtn.errors import UserError
from mmdtn.export.inputs import steps_of
from mmdtn.export.predict import as_opencv, draw, mask_of, prepare, run_lengths

sides = st.integers(1, 300)


def pixels(height, width):
    return np.random.default_rng(height * 1000 + width).integers(0, 256, (height, width, 3), dtype=np.uint8)


@given(old=st.tuples(sides, sides), new=st.tuples(sides, sides))
def test_bilinear_as_opencv(old, new):
    image = pixels(*old)
    expected = cv2.resize(image, new, interpolation=cv2.INTER_LINEAR)
    np.testing.assert_array_equal(as_opencv(image, new, 'bilinear'), expected)


def config(*steps):
    return Config(dict(test_dataloader=dict(dataset=dict(type='RepeatDataset', dataset=dict(pipeline=[*steps])))))


LOAD, PACK = dict(type='LoadImageFromFile'), dict(type='mmdet.PackDetInputs')
BICUBIC = dict(backend='pillow', interpolation='bicubic')
PIPELINES = {
    'coco': ('mmdet', [dict(type='Resize', scale=(1333, 800), keep_ratio=True)]),
    'shapes': ('mmdet', [dict(type='Resize', scale=(192, 192), keep_ratio=True)]),
    'stretched': ('mmdet', [dict(type='Resize', scale=(300, 200), keep_ratio=False)]),
    'imagenet': (
        'mmpretrain',
        [dict(type='ResizeEdge', scale=256, edge='short', **BICUBIC), dict(type='CenterCrop', crop_size=224)],
    ),
    'edges': ('mmpretrain', [dict(type='ResizeEdge', scale=91, edge='long'), dict(type='CenterCrop', crop_size=80)]),
}


@pytest.mark.parametrize('name', PIPELINES)
@pytest.mark.parametrize('size', [(333, 500), (427, 301), (120, 121), (64, 64), (37, 405)])
def test_prepares_as_the_pipeline(name, size):
    scope, steps = PIPELINES[name]
    init_default_scope(scope)
    image = pixels(*size)
    expected = Compose(ConfigDict(steps=steps).steps)(dict(img=image, img_shape=size))['img']
    np.testing.assert_array_equal(prepare(image, steps_of(config(LOAD, *steps, PACK))), expected)


def test_a_limit_shrinks_what_exceeds_it():
    steps = [dict(do='resize', scale=[400, 400], keep_ratio=True, backend='cv2', interpolation='bilinear')]
    assert prepare(pixels(100, 200), steps).shape == (200, 400, 3)
    assert prepare(pixels(100, 200), steps, limit=(320, 256)).shape == (160, 320, 3)
    assert prepare(pixels(200, 100), steps, limit=(320, 256)).shape == (256, 128, 3)


@pytest.mark.parametrize(
    'step',
    [
        dict(type='Resize', scale=(200, 200), interpolation='area'),
        dict(type='Resize', scale_factor=0.5),
        dict(type='RandomFlip', prob=0.5),
    ],
)
def test_refuses_what_it_does_not_know(step):
    init_default_scope('mmdet')
    with pytest.raises(UserError, match=rf'{step["type"]}\(.*predict\.py'):
        steps_of(config(LOAD, step, PACK))


@given(height=sides, width=sides, seed=st.integers(0, 9))
def test_run_lengths(height, width, seed):
    mask = np.random.default_rng(seed).random((height, width)) < seed / 9
    code = run_lengths(mask)
    assert (mask_of(code) == mask).all() and sum(code['counts']) == mask.size
    compressed = frPyObjects(dict(size=code['size'], counts=code['counts']), height, width)
    np.testing.assert_array_equal(decode(compressed), mask)


@pytest.mark.parametrize(
    ('box', 'label_at'),
    [
        ((20, 40, 120, 90), (21, 39)),  # above the box
        ((20, 2, 120, 90), (21, 3)),  # no room above: inside
        ((180, 40, 199, 90), (170, 39)),  # no room to the right: moved to the left
    ],
)
def test_labels_have_a_background_and_leave_the_line_of_the_box_whole(box, label_at):
    found = dict(boxes=[list(box)], labels=[1], scores=[0.9], names=['ring'])
    picture = np.asarray(draw(Image.new('RGB', (200, 100), 'white'), found, 0.3))
    colour = picture[box[3], (box[0] + box[2]) // 2]
    assert (picture[label_at[1], label_at[0]] == colour).all()
    assert (picture[box[1], box[0] : box[2] + 1] == colour).all(), 'the upper line'
    written = (picture < 100).all(-1)
    assert written.sum() > 20, 'dark text'
    _, columns = written.nonzero()
    assert columns.max() < 199 and not written[box[1]].any()
