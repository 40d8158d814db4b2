import json

import numpy as np
import pytest
from PIL import Image

from mmdtn.datasets import write_coco
from mmdtn.engine.faults import DataError, coco_faults, image_fault


@pytest.fixture(scope='module')
def coco(tmp_path_factory):
    return write_coco(tmp_path_factory.mktemp('data') / 'coco', train=4, val=1, sides=(64, 80))


@pytest.fixture
def annotations(coco, tmp_path):
    """Returns the content of an annotation file, and a function that writes it to a new file."""
    content = json.loads((coco / 'annotations' / 'instances_train.json').read_text())

    def write():
        path = tmp_path / 'changed.json'
        path.write_text(json.dumps(content))
        return str(path)

    return content, write


def test_a_good_file_has_no_faults(annotations):
    assert coco_faults(annotations[1]()) == []


@pytest.mark.parametrize(
    ('change', 'expected'),
    [
        (dict(bbox=[4, 4, 0, 9]), 'annotation 2 of image 1 (000001.jpg) is 0 x 9 pixels'),
        (dict(bbox=[4, 4, 9, -3]), 'annotation 2 of image 1 (000001.jpg) is 9 x -3 pixels'),
        (dict(bbox=[4, 4, float('nan'), 3]), 'annotation 2 of image 1 (000001.jpg) is nan x 3 pixels'),
        (dict(bbox=[]), 'annotation 2 of image 1 (000001.jpg) has no box of four numbers, but []'),
        (
            dict(bbox=['4', '4', '9', '3']),
            "annotation 2 of image 1 (000001.jpg) has no box of four numbers, but ['4', '4', '9', '3']",
        ),
        (dict(category_id=6), 'annotation 2 of image 1 (000001.jpg) has category 6; the file defines 1 to 5'),
        (dict(image_id=77), 'annotation 2 of image 77 (not in the file)'),
        (dict(id=1), 'annotation id 1 is used more than once'),
    ],
)
def test_faults_of_annotations_are_named(annotations, change, expected):
    content, write = annotations
    assert content['annotations'][1]['image_id'] == 1
    content['annotations'][1].update(change)
    assert coco_faults(write()) == [expected]


def test_faults_of_image_entries_are_named(annotations):
    content, write = annotations
    content['images'][2]['height'] = 0
    width = content['images'][2]['width']
    assert coco_faults(write()) == [f'image 3 (000003.jpg) is {width} x 0 pixels']


def test_classes_of_the_config_are_those_of_the_file_in_its_order(annotations):
    content, write = annotations
    names = [category['name'] for category in content['categories']]
    assert coco_faults(write(), names) == coco_faults(write(), [names[0], names[3]]) == []
    with pytest.raises(DataError, match=r"changed\.json has no category 'rong'; nearest: ring.* checked, cr"):
        coco_faults(write(), ['rong'])
    with pytest.raises(DataError, match=rf"another order .*classes=\('{names[0]}', '{names[3]}'\)\)"):
        coco_faults(write(), [names[3], names[0]])


def test_files_without_anything_to_use(annotations, tmp_path):
    content, write = annotations
    area = content['annotations'][1].pop('area')
    with pytest.raises(DataError, match=r'changed\.json: 1 annotations have no "area".* id 2'):
        coco_faults(write())
    content['annotations'][1]['area'] = area
    content['images'] = []
    with pytest.raises(DataError, match=r'changed\.json has no images'):
        coco_faults(write())
    del content['categories']
    with pytest.raises(DataError, match=r'changed\.json lacks categories'):
        coco_faults(write())
    del content['annotations']
    assert coco_faults(write()) == []  # like COCO's files for test images
    path = tmp_path / 'half.json'
    path.write_text('{"images": [{"id": 1, "file_na')
    with pytest.raises(DataError, match=r'half\.json is not JSON: .* line 1 column'):
        coco_faults(str(path))
    path.write_text('[]')
    with pytest.raises(DataError, match=r'half\.json is a list'):
        coco_faults(str(path), ['ring'])
    assert coco_faults(str(path)) == []  # like the captions of MMPretrain
    path.write_text('{"metainfo": {}, "data_list": []}')
    assert coco_faults(str(path)) == []  # OpenMMLab's own format


@pytest.mark.parametrize(
    'annotation',
    [
        dict(image_id=1, file_name='1.png', segments_info=[]),
        dict(image_id=1, id=1, caption='a ring'),
        dict(question_id=1, image_id=1, answers=[]),
    ],
    ids=['panoptic', 'captions', 'questions'],
)
def test_annotations_of_other_things_than_boxes_have_no_faults(annotations, annotation):
    content, write = annotations
    content['annotations'] = [annotation]
    assert coco_faults(write()) == []


def test_images_may_be_named_by_their_url(annotations):
    content, write = annotations
    for image in content['images']:
        image['coco_url'] = f'http://images/{image.pop("file_name")}'
    assert coco_faults(write()) == []
    content['annotations'][1]['category_id'] = 6
    assert 'image 1 (http://images/000001.jpg) has category 6' in coco_faults(write())[0]


def test_a_picture_too_large_for_pillow_is_whole(tmp_path, monkeypatch):
    Image.new('L', (30, 30)).save(tmp_path / 'large.png')
    monkeypatch.setattr(Image, 'MAX_IMAGE_PIXELS', 400)
    assert image_fault(str(tmp_path / 'large.png')) is None


@pytest.mark.parametrize(
    ('kind', 'mode'), [('jpg', 'RGB'), ('png', 'RGB'), ('bmp', 'RGB'), ('webp', 'RGB'), ('png', 'L')]
)
def test_whole_and_broken_images(tmp_path, kind, mode):
    path = tmp_path / f'image.{kind}'
    noise = np.random.default_rng(0).integers(0, 255, (40, 50, 3)).astype('uint8')
    Image.fromarray(noise).convert(mode).save(path)
    content = path.read_bytes()
    assert image_fault(str(path)) is None
    path.write_bytes(content + b'\0' * 500)  # some cameras append bytes to the image
    assert image_fault(str(path)) is None
    for part in (0.5, 0.9):
        path.write_bytes(content[: int(len(content) * part)])
        assert image_fault(str(path)), part
    path.write_bytes(b'')
    assert image_fault(str(path)) == 'the file is empty'
    path.write_bytes(b'<html>not found</html>' * 20)
    assert 'cannot identify' in image_fault(str(path))
    path.unlink()
    assert image_fault(str(path)) == 'there is no such file'
