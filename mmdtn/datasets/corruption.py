"""Corrupted pictures: the 19 corruptions of ImageNet-C in five severities (arXiv 1903.12261), made while loading."""

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
    extra=('speckle_noise', 'gaussian_blur', 'spatter', 'saturate'),  # for tuning, never part of a benchmark's mean
)
CORRUPTIONS = tuple(name for names in GROUPS.values() for name in names)
BENCHMARK = tuple(name for name in CORRUPTIONS if name not in GROUPS['extra'])
SEVERITIES = (1, 2, 3, 4, 5)
SEEDED_APART = ('impulse_noise', 'glass_blur')  # draw from numbers of their own instead of numpy's global ones
SMALLEST = 32  # pixels a side


def chosen(names: Sequence[str]) -> tuple[str, ...]:
    """The corruptions that are meant by their own names, by those of groups, by ``'benchmark'`` or by ``'all'``."""
    groups = GROUPS | dict(benchmark=BENCHMARK, all=CORRUPTIONS)
    for name in names:
        if name not in groups and name not in CORRUPTIONS:
            raise UserError(f'there is no corruption {name!r}{nearest(name, (*groups, *CORRUPTIONS))}')
    wanted = {corruption for name in names for corruption in groups.get(name, (name,))}
    return tuple(name for name in CORRUPTIONS if name in wanted)


@TRANSFORMS.register_module()
class Corruption:
    """Corrupts a picture behind ``LoadImageFromFile``, the same way in every process and order.

    The functions are those of the package imagecorruptions. They follow ImageNet-C, but do not make its very pictures:
    what is measured with them is not ImageNet-C. All random numbers come from the corruption, the severity and the name
    of the file; numpy's own are left as they were.

    Args:
        name: One of ``CORRUPTIONS``.
        severity: 1 to 5.

    Example:
        test_pipeline = [dict(type='LoadImageFromFile'), dict(type='Corruption', name='fog', severity=3), ...]
    """

    def __init__(self, name: str, severity: int) -> None:
        if name not in CORRUPTIONS:
            raise ValueError(f'there is no corruption {name!r}; choose one of {list(CORRUPTIONS)}.')
        if severity not in SEVERITIES:
            raise ValueError(f'severity={severity!r}: choose 1 to 5.')
        self.name, self.severity = name, severity

    def __call__(self, results: dict[str, Any]) -> dict[str, Any]:
        image = results['img']
        file = results.get('img_path') or f'picture {results.get("sample_idx", "without a file")}'
        if image.ndim != 3 or image.shape[2] != 3:
            shape = ' x '.join(map(str, image.shape))
            raise UserError(f'{file}: {self.name} takes colour pictures, but this one is {shape}.')
        if min(image.shape[:2]) < SMALLEST:
            shape = f'{image.shape[1]} x {image.shape[0]}'
            raise UserError(f'{file}: {self.name} takes pictures of {SMALLEST} pixels a side or more, not {shape}.')
        rgb = np.ascontiguousarray(image[..., ::-1], dtype=np.uint8)  # MM loads BGR
        results['img'] = np.ascontiguousarray(self.corrupt(rgb, Path(file).name)[..., ::-1], dtype=image.dtype)
        return results

    def corrupt(self, rgb: NDArray[np.uint8], file: str) -> NDArray[np.uint8]:
        """The picture, ``H x W x 3``, as this file's is corrupted."""
        try:
            from imagecorruptions import corrupt  # half a second, for those who corrupt
        except ModuleNotFoundError:
            raise UserError('corrupting pictures needs imagecorruptions: pip install imagecorruptions-imaug') from None

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
    """A pipeline's settings with a corruption behind the step that loads the picture."""
    for i, step in enumerate(pipeline):
        if any(base.__name__ == 'LoadImageFromFile' for base in class_of(step, TRANSFORMS).__mro__):
            corruption = dict(type='mmengine.Corruption', name=name, severity=severity)
            return [*pipeline[: i + 1], corruption, *pipeline[i + 1 :]]
    raise UserError('the test pipeline has no LoadImageFromFile, behind which pictures are corrupted.')
