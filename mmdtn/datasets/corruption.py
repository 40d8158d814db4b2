"""Applies the 19 corruptions of ImageNet-C (arXiv 1903.12261) at five severities while images are loaded."""

import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from mmengine.registry import TRANSFORMS
from numpy.typing import NDArray

from mmdtn.errors import UserError, nearest
from mmdtn.registry import class_of

GROUPS = dict(
    noise=('gaussian_noise', 'shot_noise', 'impulse_noise'),
    blur=('defocus_blur', 'glass_blur', 'motion_blur', 'zoom_blur'),
    weather=('snow', 'frost', 'fog', 'brightness'),
    digital=('contrast', 'elastic_transform', 'pixelate', 'jpeg_compression'),
    extra=('speckle_noise', 'gaussian_blur', 'spatter', 'saturate'),  # for tuning; excluded from the benchmark's mean
)
CORRUPTIONS = tuple(name for names in GROUPS.values() for name in names)
BENCHMARK = tuple(name for name in CORRUPTIONS if name not in GROUPS['extra'])
SEVERITIES = (1, 2, 3, 4, 5)
SEEDED_APART = ('impulse_noise', 'glass_blur')  # these use their own random generator instead of numpy's global one
SMALLEST = 32  # smallest height and width in pixels


def chosen(names: Sequence[str]) -> tuple[str, ...]:
    """Returns the corruptions with the given names.

    A name can also be one of the groups ``'benchmark'`` and ``'all'``.
    """
    groups = GROUPS | dict(benchmark=BENCHMARK, all=CORRUPTIONS)
    for name in names:
        if name not in groups and name not in CORRUPTIONS:
            raise UserError(f'There is no corruption {name!r}{nearest(name, (*groups, *CORRUPTIONS))}')
    wanted = {corruption for name in names for corruption in groups.get(name, (name,))}
    return tuple(name for name in CORRUPTIONS if name in wanted)


@TRANSFORMS.register_module()
class Corruption:
    """Transform that corrupts an image. Put it directly after ``LoadImageFromFile``.

    The package imagecorruptions provides the corruptions. It follows ImageNet-C but does not reproduce the same images,
    so results are not comparable with published results on ImageNet-C.

    The random seed depends only on the corruption, the severity and the file name. Each image is therefore corrupted in
    the same way, whatever the process and the order. The state of numpy's global random generator is restored
    afterwards.

    Args:
        name: One of ``CORRUPTIONS``.
        severity: 1 to 5.

    Example:
        test_pipeline = [dict(type='LoadImageFromFile'), dict(type='Corruption', name='fog', severity=3), ...]
    """

    def __init__(self, name: str, severity: int) -> None:
        if name not in CORRUPTIONS:
            raise ValueError(f'There is no corruption {name!r}. Choose one of {list(CORRUPTIONS)}.')
        if severity not in SEVERITIES:
            raise ValueError(f'severity={severity!r} does not exist. Choose one from 1 to 5.')
        self.name, self.severity = name, severity

    def __call__(self, results: dict[str, Any]) -> dict[str, Any]:
        image = results['img']
        file = results.get('img_path') or f'image {results.get("sample_idx", "without a file")}'
        if image.ndim != 3 or image.shape[2] != 3:
            shape = ' x '.join(map(str, image.shape))
            raise UserError(f'{file}: {self.name} needs colour images, but this image is {shape}.')
        if min(image.shape[:2]) < SMALLEST:
            shape = f'{image.shape[1]} x {image.shape[0]}'
            raise UserError(
                f'{file}: {self.name} needs images of at least {SMALLEST} x {SMALLEST} pixels, not {shape}.'
            )
        rgb = np.ascontiguousarray(image[..., ::-1], dtype=np.uint8)  # MM loads BGR
        results['img'] = np.ascontiguousarray(self.corrupt(rgb, Path(file).name)[..., ::-1], dtype=image.dtype)
        return results

    def corrupt(self, rgb: NDArray[np.uint8], file: str) -> NDArray[np.uint8]:
        """Corrupts an ``H x W x 3`` image. The file name determines the random seed."""
        try:
            from imagecorruptions import corrupt  # imported here because the import takes half a second
        except ModuleNotFoundError:
            raise UserError(
                'The package imagecorruptions is not installed. Install it with pip install imagecorruptions-imaug'
            ) from None

        seed = zlib.crc32(f'{self.name}/{self.severity}/{file}'.encode())
        before = np.random.get_state()
        np.random.seed(seed)
        try:
            own = dict(seed=seed) if self.name in SEEDED_APART else {}
            return corrupt(rgb, severity=self.severity, corruption_name=self.name, **own)
        finally:
            np.random.set_state(before)

    def __repr__(self) -> str:
        return f'Corruption(name={self.name!r}, severity={self.severity})'


def with_corruption(pipeline: Sequence[dict[str, Any]], name: str, severity: int) -> list[dict[str, Any]]:
    """Returns a pipeline's settings with a corruption inserted after the step that loads the image."""
    for i, step in enumerate(pipeline):
        if any(base.__name__ == 'LoadImageFromFile' for base in class_of(step, TRANSFORMS).__mro__):
            corruption = dict(type='mmengine.Corruption', name=name, severity=severity)
            return [*pipeline[: i + 1], corruption, *pipeline[i + 1 :]]
    raise UserError('The test pipeline has no LoadImageFromFile. Add one, as images are corrupted right after it.')
