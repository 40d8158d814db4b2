"""``Corruption`` applies the functions of imagecorruptions in a repeatable way."""

import subprocess
import sys

import numpy as np
import pytest
from imagecorruptions import corrupt
from mmengine.dataset import Compose
from mmengine.registry import TRANSFORMS
from PIL import Image

from mmdtn.datasets import draw_scene
from mmdtn.datasets.corruption import BENCHMARK, CORRUPTIONS, GROUPS, SEVERITIES, Corruption, chosen, with_corruption
from mmdtn.errors import UserError


@pytest.fixture(scope='module')
def rgb():
    return draw_scene(np.random.default_rng(0), 96, 120, [0, 1, 2], [50, 60, 40])[0]


def load(rgb, path='pictures/a.jpg'):
    return dict(img=rgb[..., ::-1].copy(), img_path=path)


def noise_ratio(rgb, corrupted):
    """Computes the PSNR in decibels."""
    return 10 * np.log10(255**2 / np.square(rgb.astype(float) - corrupted).mean())


@pytest.mark.parametrize('name', CORRUPTIONS)
def test_it_is_repeatable_and_leaves_numpy_alone(rgb, name):
    np.random.seed(1)
    state = np.random.get_state()[1].copy()
    first = Corruption(name, 3)(load(rgb))['img']
    assert np.array_equal(np.random.get_state()[1], state)
    np.random.seed(2)
    assert np.array_equal(Corruption(name, 3)(load(rgb))['img'], first)
    assert first.dtype == np.uint8 and first.shape == rgb.shape and (first != rgb[..., ::-1]).any()


@pytest.mark.parametrize('name', ['gaussian_noise', 'impulse_noise', 'glass_blur'])
def test_another_file_has_another_pattern(rgb, name):
    a, b = (Corruption(name, 3)(load(rgb, path))['img'] for path in ('x/a.jpg', 'x/b.jpg'))
    assert (a != b).any()
    assert np.array_equal(Corruption(name, 3)(load(rgb, 'elsewhere/a.jpg'))['img'], a)


@pytest.mark.parametrize('name', ['contrast', 'brightness', 'jpeg_compression', 'pixelate', 'saturate'])
def test_channels_are_turned_to_rgb_and_back(rgb, name):
    """Corruptions without random numbers equal the package's own functions of the RGB image."""
    ours = Corruption(name, 4)(load(rgb))['img'][..., ::-1]
    assert np.array_equal(ours, corrupt(rgb, severity=4, corruption_name=name))


def test_the_picture_keeps_its_dtype(rgb):
    floats = load(rgb.astype(np.float32))
    assert Corruption('contrast', 2)(floats)['img'].dtype == np.float32


@pytest.mark.parametrize(
    'name',
    ['gaussian_noise', 'shot_noise', 'impulse_noise', 'defocus_blur', 'motion_blur', 'zoom_blur', 'gaussian_blur'],
)
def test_it_grows_with_severity(rgb, name):
    ratios = [noise_ratio(rgb, Corruption(name, s).corrupt(rgb, 'a.jpg')) for s in SEVERITIES]
    assert ratios == sorted(ratios, reverse=True) and ratios[0] - ratios[-1] > 2


@pytest.mark.slow
def test_the_same_picture_in_another_process_and_in_workers(rgb, tmp_path):
    """Images are equal with two data workers, with none, and in a process with another hash seed."""
    from torch.utils.data import DataLoader

    Image.fromarray(rgb).save(tmp_path / 'a.png')
    settings = with_corruption([dict(type='mmcv.LoadImageFromFile')], 'glass_blur', 3)
    pictures = [
        [(data['img_path'], data['img'].tobytes()) for data in DataLoader(data, 1, num_workers=n, collate_fn=first)]
        for n in (0, 2)
        for data in [Files([str(tmp_path / 'a.png')] * 3, settings)]
    ]
    assert pictures[0] == pictures[1]
    code = (
        'import sys, zlib, numpy as np; from PIL import Image; from mmdtn.datasets.corruption import Corruption; '
        "p = sys.argv[1]; print(zlib.crc32(Corruption('glass_blur', 3).corrupt(np.array(Image.open(p)), 'a.png')))"
    )
    done = subprocess.run([sys.executable, '-c', code, tmp_path / 'a.png'], capture_output=True, text=True, check=True)
    import zlib

    assert int(done.stdout) == zlib.crc32(Corruption('glass_blur', 3).corrupt(rgb, 'a.png'))


class Files:
    def __init__(self, paths, pipeline):
        self.paths, self.pipeline = paths, Compose(pipeline)

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        return self.pipeline(dict(img_path=self.paths[index]))


def first(samples):
    return samples[0]


@pytest.mark.parametrize(
    'shape, message', [((40, 50), 'colour'), ((40, 50, 1), '40 x 50 x 1'), ((31, 50, 3), '50 x 31')]
)
def test_what_cannot_be_corrupted_is_named(shape, message):
    with pytest.raises(UserError, match=rf'dir/b\.jpg: fog .*{message}'):
        Corruption('fog', 1)(dict(img=np.zeros(shape, np.uint8), img_path='dir/b.jpg'))


def test_names():
    assert len(CORRUPTIONS) == 19 and len(BENCHMARK) == 15 and set(GROUPS['extra']).isdisjoint(BENCHMARK)
    assert chosen(['benchmark']) == BENCHMARK and chosen(['all']) == CORRUPTIONS
    assert chosen(['fog', 'noise']) == (*GROUPS['noise'], 'fog')
    with pytest.raises(UserError, match='nearest: defocus_blur'):
        chosen(['defocus'])
    with pytest.raises(ValueError, match='gausian_noise'):
        Corruption('gausian_noise', 1)
    with pytest.raises(ValueError, match='severity=0'):
        Corruption('fog', 0)


@pytest.mark.parametrize('scope', ['', 'mmdet.', 'mmcv.'])
def test_it_goes_behind_the_loading_step_of_any_name(scope):
    import mmdet.datasets  # registers the names of mmdet

    pipeline = [dict(type=f'{scope}LoadImageFromFile'), dict(type='mmcv.Resize', scale=(8, 8))]
    if not scope:
        pipeline[0]['type'] = TRANSFORMS.get('mmcv.LoadImageFromFile')
    changed = with_corruption(pipeline, 'fog', 2)
    assert [step['type'] for step in changed][1:] == ['mmengine.Corruption', 'mmcv.Resize'] and len(pipeline) == 2
    assert repr(Compose(changed).transforms[1]) == "Corruption(name='fog', severity=2)"
    assert mmdet.datasets
    with pytest.raises(UserError, match='LoadImageFromFile'):
        with_corruption(pipeline[1:], 'fog', 2)
