"""Generates images of shapes on textured backgrounds as arrays, COCO files or class folders, with exact masks.

The classes ``checked`` and ``striped`` differ only in texture. The classes ``cross``, ``ring`` and ``triangle`` differ
only in outline. The same seed always gives the same images.
"""

import json
import math
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray
from PIL import Image

Array = NDArray[Any]

CLASSES = ('checked', 'cross', 'ring', 'striped', 'triangle')  # in alphabetical order, as class folders are read
METAINFO = dict(classes=CLASSES, palette=[(230, 60, 60), (60, 160, 240), (250, 190, 40), (60, 190, 90), (190, 90, 220)])
VERSION = 1  # increase this number whenever a seed gives different images than before
TRAIN, VAL = 1200, 100  # default numbers of images
SPLITS = ('train', 'val')
RECORD = 'shapes.json'  # file that records the arguments of a finished data set

# An object is drawn only if at least this share of its area is visible. The area includes parts outside the image.
MIN_VISIBLE = 0.5
MIN_AREA = 40  # smallest visible area of an object in pixels


def draw_scene(
    rng: Generator, height: int, width: int, labels: Sequence[int] | Array, sizes: Sequence[float] | Array
) -> tuple[Array, Array, Array]:
    """Draws objects with the given labels and sizes, which are diameters in pixels.

    Later objects cover earlier ones. Objects that would be mostly hidden are not drawn.

    Returns the RGB image ``height x width x 3``, the labels of the ``N`` objects that were drawn, and the masks of
    their visible parts, ``N x height x width``.
    """
    image = _ground(rng, height, width)
    objects = [_Object(rng, label, size, height, width) for label, size in zip(labels, sizes, strict=True)]
    visible = _visible(objects, height, width)
    objects = [
        thing
        for thing, mask in zip(objects, visible, strict=True)
        if mask.sum() >= max(MIN_AREA, MIN_VISIBLE * thing.whole_area)
    ]
    for thing in objects:
        thing.paint(image, rng)
    image += rng.normal(0, 3, image.shape)
    return (
        image.clip(0, 255).astype(np.uint8),
        np.array([thing.label for thing in objects], dtype=np.int64),
        _visible(objects, height, width),
    )


class _Object:
    """An object with a position and an outline.

    ``distance`` is the signed distance to the outline, in pixels, for a window of the image. It is negative inside.
    """

    def __init__(self, rng: Generator, label: int, size: float, height: int, width: int) -> None:
        self.label = label
        self.radius = size / 2
        outline, textures = _KINDS[CLASSES[label]]
        self.texture = textures[rng.integers(len(textures))]
        cx, cy = rng.uniform(0.08, 0.92, 2) * (width, height)
        angle, stretch = rng.uniform(0, 2 * math.pi), rng.uniform(0.8, 1)
        reach = math.ceil(self.radius) + 1
        x = np.arange(math.floor(cx) - reach, math.ceil(cx) + reach + 1)
        y = np.arange(math.floor(cy) - reach, math.ceil(cy) + reach + 1)
        dx, dy = x[None, :] + 0.5 - cx, y[:, None] + 0.5 - cy
        u = (dx * math.cos(angle) + dy * math.sin(angle)) / self.radius
        v = (dy * math.cos(angle) - dx * math.sin(angle)) / self.radius / stretch
        distance = outline(rng, u, v) * self.radius * stretch
        self.whole_area = int((distance < 0).sum())
        inside_x, inside_y = (x >= 0) & (x < width), (y >= 0) & (y < height)
        inside = np.ix_(inside_y, inside_x)
        self.window = (slice(y[inside_y][0], y[inside_y][-1] + 1), slice(x[inside_x][0], x[inside_x][-1] + 1))
        self.u, self.v, self.distance = u[inside], v[inside], distance[inside]

    def paint(self, image: Array, rng: Generator) -> None:
        """Paints the object on ``image`` in place and smooths its edge over one pixel."""
        ground = image[self.window]
        first, second = _colours(rng, ground.mean((0, 1)))
        mix = (self.texture(rng, self.u, self.v, self.radius)[..., None] + 1) / 2
        cover = (0.5 - self.distance).clip(0, 1)[..., None]
        ground += cover * (first * (1 - mix) + second * mix - ground)


def _visible(objects: Sequence[_Object], height: int, width: int) -> Array:
    """Computes the ``N x height x width`` masks of the visible parts of all objects.

    Later objects cover earlier ones.
    """
    masks = np.zeros((len(objects), height, width), dtype=bool)
    for i, thing in enumerate(objects):
        inside = thing.distance < 0
        masks[(slice(i), *thing.window)] &= ~inside
        masks[(i, *thing.window)] = inside
    return masks


# Outlines. Each function computes the signed distance to the edge, which is negative inside the outline. Coordinates
# and distances are in units of the radius.


def _blob(rng: Generator, u: Array, v: Array) -> Array:
    angle = np.arctan2(v, u)
    waves = [
        a * np.cos(k * angle + p) for k, a, p in zip((2, 3, 4), *rng.uniform(0, (0.09, 6.3), (3, 2)).T, strict=True)
    ]
    return np.hypot(u, v) - 0.78 * (1 + np.sum(waves, 0))


def _cross(rng: Generator, u: Array, v: Array) -> Array:
    arm = rng.uniform(0.24, 0.34)
    u, v = abs(u), abs(v)
    return np.minimum(np.maximum(u - arm, v - 0.92), np.maximum(u - 0.92, v - arm))


def _ring(rng: Generator, u: Array, v: Array) -> Array:
    half = rng.uniform(0.17, 0.25)
    return abs(np.hypot(u, v) - (1 - half)) - half


def _triangle(rng: Generator, u: Array, v: Array) -> Array:
    corners = np.arange(3) * 2 * math.pi / 3 + rng.uniform(-0.25, 0.25, 3)
    following = np.append(corners[1:], corners[0] + 2 * math.pi)
    normals, halves = (corners + following) / 2, (following - corners) / 2
    return np.max([u * math.cos(n) + v * math.sin(n) - math.cos(h) for n, h in zip(normals, halves, strict=True)], 0)


# Textures. Each function computes the mix of two colours as a value from -1 to 1. ``u`` and ``v`` are in units of the
# radius, and the radius is in pixels.


def _stripes(rng: Generator, u: Array, v: Array, radius: float) -> Array:
    return (4 * np.sin(_phase(rng, u, radius))).clip(-1, 1)


def _checks(rng: Generator, u: Array, v: Array, radius: float) -> Array:
    return (4 * np.sin(_phase(rng, u, radius)) * np.sin(_phase(rng, v, radius))).clip(-1, 1)


def _phase(rng: Generator, u: Array, radius: float) -> Array:
    period = max(7.0, radius * rng.uniform(0.35, 0.6))
    return u * radius * (2 * math.pi / period) + rng.uniform(0, 2 * math.pi)


def _shaded(rng: Generator, u: Array, v: Array, radius: float) -> Array:
    return rng.choice([-0.9, 0.9]) + 0.1 * (u + v)


def _mottled(rng: Generator, u: Array, v: Array, radius: float) -> Array:
    height, width = u.shape
    return (0.6 * _noise(rng, height, width, 6)).clip(-1, 1)


_Outline = Callable[[Generator, Array, Array], Array]
_Texture = Callable[[Generator, Array, Array, float], Array]
_KINDS: dict[str, tuple[_Outline, tuple[_Texture, ...]]] = dict(
    checked=(_blob, (_checks,)),
    cross=(_cross, (_shaded, _mottled)),
    ring=(_ring, (_shaded, _mottled)),
    striped=(_blob, (_stripes,)),
    triangle=(_triangle, (_shaded, _mottled)),
)


def _ground(rng: Generator, height: int, width: int) -> Array:
    """Draws the background: two colours mixed by coarse and fine noise and, in half of the images, faint stripes."""
    first, second = rng.uniform(40, 215, (2, 3))
    mix = 0.5 * _noise(rng, height, width, 40) + 0.2 * _noise(rng, height, width, 8)
    if rng.random() < 0.5:
        angle, period = rng.uniform(0, math.pi), rng.uniform(10, 40)
        along = np.arange(width) * math.cos(angle) + np.arange(height)[:, None] * math.sin(angle)
        mix += 0.3 * np.sin(along * (2 * math.pi / period))
    mix = (mix[..., None] + 1) / 2
    return first * (1 - mix) + second * mix


def _noise(rng: Generator, height: int, width: int, scale: int) -> Array:
    """Draws smooth noise with a standard deviation of about 1 and spots of about ``scale`` pixels."""
    coarse = rng.normal(size=(height // scale + 2, width // scale + 2)).astype(np.float32)
    return np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC), dtype=np.float64)


def _colours(rng: Generator, ground: Array) -> tuple[Array, Array]:
    """Draws two colours that differ from each other in brightness and from the background in colour."""
    while True:
        first, second = rng.uniform(0, 255, (2, 3))
        apart = min(abs(first - ground).max(), abs(second - ground).max())
        if apart > 70 and abs(first.mean() - second.mean()) > 60:
            return first, second


def write_coco(
    root: str | Path, train: int = TRAIN, val: int = VAL, seed: int = 0, sides: tuple[int, int] = (128, 224)
) -> Path:
    """Writes a detection data set in COCO's layout.

    The images are in ``root/train`` and ``root/val``, and the annotations in
    ``root/annotations/instances_{train,val}.json``.

    Args:
        root: Directory to create. An existing data set with the same arguments is kept, and one with different
            arguments is replaced. Any other existing content is an error.
        train: Number of training images.
        val: Number of validation images.
        seed: Random seed. Each image depends only on the seed, its split, its number and ``sides``.
        sides: Smallest and largest side of an image in pixels.
    """
    return _write(root, _write_coco_split, dict(kind='coco', train=train, val=val, seed=seed, sides=list(sides)))


def write_classification(
    root: str | Path, train: int = TRAIN, val: int = VAL, seed: int = 0, sides: tuple[int, int] = (56, 80)
) -> Path:
    """Writes a classification data set with one object per image to ``root/train/CLASS`` and ``root/val/CLASS``.

    The images are divided equally among the classes. MMPretrain's ``CustomDataset`` and torchvision's ``ImageFolder``
    can read the data set. The arguments are those of :func:`write_coco`.
    """
    record = dict(kind='classification', train=train, val=val, seed=seed, sides=list(sides))
    return _write(root, _write_classification_split, record)


def _write(root: str | Path, write_split: Callable[..., None], record: dict[str, Any]) -> Path:
    """Writes a data set to a temporary directory and renames it at the end, so that no partial data set remains."""
    low, high = record['sides']
    if min(record['train'], record['val']) < 1 or not 32 <= low <= high:
        raise ValueError(
            f'train={record["train"]}, val={record["val"]}, sides={(low, high)} are not valid. Give at least one image '
            'per split, and sides as (smallest, largest) of at least 32 pixels.'
        )
    root = Path(root)
    record = dict(version=VERSION, **record)
    if _is_whole(root, record):
        return root
    if root.exists() and not (root / RECORD).exists() and (not root.is_dir() or any(root.iterdir())):
        raise FileExistsError(f'{root} is not a generated data set and is not replaced. Give another directory.')
    root.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f'.{root.name}-', dir=root.parent) as temporary:
        new = Path(temporary, 'new')
        for split in SPLITS:
            write_split(new, split, record)
        (new / RECORD).write_text(json.dumps(record))
        if _is_whole(root, record):  # another process has written the data set in the meantime
            return root
        if root.exists():
            shutil.move(root, Path(temporary, 'old'))
        new.rename(root)
    return root


def _is_whole(root: Path, record: dict[str, Any]) -> bool:
    """Tells whether ``root`` was made with the arguments in ``record`` and still has all images and annotations."""
    if not (root / RECORD).is_file() or json.loads((root / RECORD).read_text()) != record:
        return False
    if record['kind'] == 'coco' and not all((root / annotations_of(split)).is_file() for split in SPLITS):
        return False
    return all(len(list((root / split).rglob('*.jpg'))) == record[split] for split in SPLITS)


def annotations_of(split: str) -> str:
    return f'annotations/instances_{split}.json'


def _generator(record: dict[str, Any], split: str, index: int) -> Generator:
    """Returns the random generator of one image. With its own generator, an image does not depend on other images."""
    return np.random.default_rng((record['seed'], SPLITS.index(split), index))


def _write_coco_split(root: Path, split: str, record: dict[str, Any]) -> None:
    (root / split).mkdir(parents=True)
    (root / 'annotations').mkdir(exist_ok=True)
    images: list[dict] = []
    annotations: list[dict] = []
    for index in range(record[split]):
        rng = _generator(record, split, index)
        height, width = (int(side) for side in rng.integers(record['sides'][0], record['sides'][1] + 1, 2))
        count = int(rng.integers(3, 11))
        sizes = np.exp(rng.uniform(math.log(20), math.log(0.75 * min(height, width)), count))
        picture, labels, masks = draw_scene(rng, height, width, rng.integers(len(CLASSES), size=count), sizes)
        name = f'{index + 1:06d}.jpg'
        _save(picture, root / split / name)
        images.append(dict(id=index + 1, file_name=name, height=height, width=width))
        for label, mask in zip(labels.tolist(), masks, strict=True):
            annotations.append(
                dict(
                    id=len(annotations) + 1,
                    image_id=index + 1,
                    category_id=label + 1,
                    segmentation=dict(size=[height, width], counts=_run_lengths(mask)),
                    area=int(mask.sum()),
                    bbox=_tight_box(mask),
                    iscrowd=0,
                )
            )
    categories = [dict(id=i, name=name, supercategory='shape') for i, name in enumerate(CLASSES, 1)]
    info = dict(description='generated shapes', version=str(VERSION))
    content = dict(info=info, licenses=[], images=images, annotations=annotations, categories=categories)
    (root / annotations_of(split)).write_text(json.dumps(content))


def _write_classification_split(root: Path, split: str, record: dict[str, Any]) -> None:
    for name in CLASSES:
        (root / split / name).mkdir(parents=True)
    for index in range(record[split]):
        rng = _generator(record, split, index)
        label = index % len(CLASSES)
        height, width = (int(side) for side in rng.integers(record['sides'][0], record['sides'][1] + 1, 2))
        while True:
            size = rng.uniform(0.5, 0.8) * min(height, width)
            picture, kept, _ = draw_scene(rng, height, width, [label], [size])
            if len(kept):  # an object that is mostly outside the image is not drawn
                break
        _save(picture, root / split / CLASSES[label] / f'{index + 1:06d}.jpg')


def _save(picture: Array, path: Path) -> None:
    Image.fromarray(picture).save(path, quality=92)


def _run_lengths(mask: Array) -> list[int]:
    """Encodes a mask in COCO's uncompressed run-length code, which goes down the columns and starts with zeros.

    Unlike polygons, this code is exact and supports holes.
    """
    flat = mask.ravel(order='F')
    edges = np.flatnonzero(np.diff(flat)) + 1
    runs = np.diff(np.concatenate(([0], edges, [flat.size]))).tolist()
    return [0, *runs] if flat[0] else runs


def _tight_box(mask: Array) -> list[int]:
    """Returns the bounding box of a mask as ``x, y, width, height``."""
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    left, top = int(columns[0]), int(rows[0])
    return [left, top, int(columns[-1]) + 1 - left, int(rows[-1]) + 1 - top]
