"""Runs a model that tools/deployment/export.py wrote: python predict.py model.onnx IMAGE... --out DIR

Only this file and the model are needed, with Python 3.10 or newer, numpy, Pillow and onnxruntime. The command writes
predictions.json and one annotated image per input to DIR. In Python, `Model(path)(image)` predicts for a Pillow image.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

INSTALL = 'pip install numpy pillow onnxruntime'
ALONE = __name__ == '__main__'  # an imported module must not end the process
if ALONE and sys.version_info < (3, 10):
    sys.exit('error: predict.py needs Python 3.10 or newer')
try:
    import numpy as np
    from PIL import Image, ImageDraw, ImageOps
except ModuleNotFoundError as error:
    if not ALONE:
        raise
    sys.exit(f'error: predict.py needs {error.name}: {INSTALL}')

SUFFIXES = ('.jpg', '.jpeg', '.png', '.bmp', '.webp', '.tif', '.tiff')
TOP = 5  # number of classes in the predictions of a classifier
WidthHeight = tuple[int, int]


class Model:
    """An exported model. Calling the model with a Pillow image returns a dict of plain numbers and names."""

    def __init__(self, path: str | Path) -> None:
        try:
            import onnxruntime  # imported here because mmdtn also imports this file to write other formats
        except ModuleNotFoundError as error:
            raise ValueError(f'predict.py needs {error.name}: {INSTALL}') from None
        if not Path(path).is_file():
            raise ValueError(f'{path} does not exist. Give the .onnx file that tools/deployment/export.py wrote')
        try:
            self.session = onnxruntime.InferenceSession(str(path), providers=onnxruntime.get_available_providers())
        except Exception as error:  # the exceptions of onnxruntime have no common base class
            raise ValueError(f'{path} cannot be loaded: {str(error).strip().splitlines()[-1]}') from None
        about = self.session.get_modelmeta().custom_metadata_map.get('mmdtn')
        if about is None:
            raise ValueError(f'{path} has no mmdtn metadata. Give a file that tools/deployment/export.py wrote')
        self.about = json.loads(about)
        if self.about['task'] == 'raw':
            raise ValueError(
                f'{path} was exported with --raw and has neither boxes nor classes. Export the model without --raw'
            )

    def __call__(self, image: Image.Image) -> dict[str, list]:
        return getattr(self, self.about['task'])(np.asarray(upright(image)))

    def classification(self, pixels: np.ndarray) -> dict[str, list]:
        pixels = prepare(pixels, self.about['prepare'])
        height, width = pixels.shape[:2]
        multiple, fixed = self.about['multiple'], self.about['size']
        if [height, width] != fixed if fixed else height % multiple or width % multiple:
            fits = f'{fixed[0]} x {fixed[1]} pixels' if fixed else f'multiples of {multiple} pixels'
            raise ValueError(f'the prepared image has {height} x {width} pixels, but the model takes {fits}')
        (scores,) = self.session.run(None, dict(image=as_batch(pixels)))
        labels = np.argsort(-scores[0], kind='stable')[:TOP]
        return dict(labels=labels.tolist(), names=self.names(labels), scores=scores[0][labels].tolist())

    def detection(self, pixels: np.ndarray) -> dict[str, list]:
        fixed = self.about['size']
        prepared = prepare(pixels, self.about['prepare'], limit=fixed and (fixed[1], fixed[0]))
        size = prepared.shape[:2]
        whole = fixed or [-(-side // self.about['multiple']) * self.about['multiple'] for side in size]
        padded = np.empty((*whole, 3), dtype=np.float32)
        padded[:] = self.about['pad']
        padded[: size[0], : size[1]] = prepared
        boxes, scores, labels, *grids = self.session.run(
            None, dict(image=as_batch(padded), size=np.array(size, dtype=np.int64))
        )
        down, across = (new / old for new, old in zip(size, pixels.shape[:2], strict=True))
        boxes = boxes / np.array([across, down, across, down], dtype=np.float32)
        found = dict(boxes=boxes.tolist(), labels=labels.tolist(), names=self.names(labels), scores=scores.tolist())
        if grids:
            shown = (pasted(*one, *pixels.shape[:2]) for one in zip(grids[0], found['boxes'], strict=True))
            found['masks'] = [run_lengths(mask) for mask in shown]
        return found

    def names(self, labels: np.ndarray) -> list[str]:
        classes = self.about['classes']
        return [classes[label] if label < len(classes) else str(label) for label in labels]


def prepare(pixels: np.ndarray, steps: list[dict[str, Any]], limit: WidthHeight | None = None) -> np.ndarray:
    """Prepares an ``H x W x 3`` image as the test pipeline does. ``limit`` is the largest width and height."""
    for step in steps:
        size = pixels.shape[1], pixels.shape[0]
        if step['do'] == 'crop':
            w, h = (min(pair) for pair in zip(step['size'], size, strict=True))
            left, top = round((size[0] - w) / 2), round((size[1] - h) / 2)
            pixels = pixels[top : top + h, left : left + w]
            continue
        new = resized(size, step)
        if limit and (new[0] > limit[0] or new[1] > limit[1]):
            new = fitted(size, min(limit[0] / size[0], limit[1] / size[1]))
        pixels = (as_opencv if step['backend'] == 'cv2' else as_pillow)(pixels, new, step['interpolation'])
    return pixels


def resized(size: WidthHeight, step: dict[str, Any]) -> WidthHeight:
    width, height = size
    if step['do'] == 'resize_edge':
        edge, scale = step['edge'], step['scale']
        if edge == 'width' or (edge == 'short' and width < height) or (edge == 'long' and width > height):
            return scale, int(scale * height / width)
        return int(scale * width / height), scale
    if not step['keep_ratio']:
        return step['scale'][0], step['scale'][1]
    return fitted(size, min(max(step['scale']) / max(size), min(step['scale']) / min(size)))


def fitted(size: WidthHeight, factor: float) -> WidthHeight:
    return max(1, int(size[0] * factor + 0.5)), max(1, int(size[1] * factor + 0.5))


def as_pillow(pixels: np.ndarray, size: WidthHeight, interpolation: str) -> np.ndarray:
    return np.asarray(Image.fromarray(pixels).resize(size, Image.Resampling[interpolation.upper()]))


def as_opencv(pixels: np.ndarray, size: WidthHeight, interpolation: str) -> np.ndarray:
    """Resizes a uint8 image exactly as cv2.resize does with bilinear interpolation.

    OpenCV uses weights of eleven bits and drops four bits of the sums along the first axis.
    """
    left, right, x, x1 = neighbours(size[0], pixels.shape[1])
    above, below, y, y1 = neighbours(size[1], pixels.shape[0])
    rows = pixels.astype(np.int32)
    rows = (rows[:, left] * x[:, None] + rows[:, right] * x1[:, None]) >> 4
    mixed = (rows[above] * y[:, None, None] >> 16) + (rows[below] * y1[:, None, None] >> 16)
    return ((mixed + 2) >> 2).astype(np.uint8)


def neighbours(new: int, old: int) -> tuple[np.ndarray, ...]:
    """Returns the two old pixels next to each new pixel along an axis, and their weights."""
    at = ((np.arange(new) + 0.5) * (1 / (new / old)) - 0.5).astype(np.float32)
    first = np.floor(at)
    places = (np.clip(first.astype(np.int64) + i, 0, old - 1) for i in (0, 1))
    weights = (np.rint(weight * np.float32(2048)).astype(np.int32) for weight in (1 - (at - first), at - first))
    return *places, *weights


def pasted(grid: np.ndarray, box: list[float], height: int, width: int) -> np.ndarray:
    """Pastes the mask of a box into an image of ``height x width`` pixels.

    ``grid`` has the mask's probabilities on a grid over the box. They are interpolated bilinearly. Pixels with a
    probability of at least 1/2 belong to the mask.
    """
    left, top, right, bottom = box
    along = []
    for start, end, cells, pixels in ((top, bottom, grid.shape[0], height), (left, right, grid.shape[1], width)):
        at = (np.arange(pixels) + 0.5 - start) / (end - start) * cells - 0.5
        along.append((1 - abs(at[:, None] - np.arange(cells))).clip(min=0))
    return along[0] @ grid @ along[1].T >= 0.5


def run_lengths(mask: np.ndarray) -> dict[str, list[int]]:
    """Encodes a mask in COCO's uncompressed run-length code, which goes down the columns and starts with zeros."""
    flat = mask.ravel(order='F')
    edges = np.flatnonzero(np.diff(flat)) + 1
    counts = np.diff(np.concatenate(([0], edges, [flat.size]))).tolist()
    return dict(size=list(mask.shape), counts=[0, *counts] if flat[0] else counts)


def mask_of(code: dict[str, list[int]]) -> np.ndarray:
    """Decodes a mask that ``run_lengths`` encoded."""
    on = np.arange(len(code['counts'])) % 2 == 1
    return np.repeat(on, code['counts']).reshape(code['size'], order='F')


def upright(image: Image.Image) -> Image.Image:
    """Converts an image to RGB and applies the orientation of its EXIF data.

    Sixteen-bit images keep only their upper eight bits, as in OpenCV.
    """
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith('I'):
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    return image.convert('RGB')


def as_batch(pixels: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(pixels.transpose(2, 0, 1)[None], dtype=np.float32)


def draw(image: Image.Image, found: dict[str, list], threshold: float) -> Image.Image:
    picture = upright(image)
    pen = ImageDraw.Draw(picture)
    if 'boxes' not in found:
        lines = (f'{name} {score:.2f}' for name, score in zip(found['names'], found['scores'], strict=True))
        pen.text((4, 4), '\n'.join(lines), fill='white', stroke_width=2, stroke_fill='black')
        return picture
    names = []
    for i, (box, label) in enumerate(zip(found['boxes'], found['labels'], strict=True)):
        if found['scores'][i] < threshold:
            continue
        colour = f'hsl({label * 137 % 360}, 80%, 55%)'
        if 'masks' in found:
            picture.paste(colour, mask=Image.fromarray(mask_of(found['masks'][i]).astype(np.uint8) * 110))
        pen.rectangle(box, outline=colour, width=2)
        names.append((box, f'{found["names"][i]} {found["scores"][i]:.2f}', colour))
    for box, text, colour in names:  # names are drawn last, so that no box or mask covers them
        write_above(pen, picture.size, box, text, colour)
    return picture


def write_above(pen: ImageDraw.ImageDraw, size: tuple[int, int], box: list[float], text: str, colour: str) -> None:
    """Writes text on a background above a box, or inside the box if there is no room above."""
    _, _, right, bottom = pen.textbbox((0, 0), text)
    width, height = right + 4, bottom + 2
    x = max(min(box[0], size[0] - width), 0)
    y = box[1] - height if box[1] >= height else max(box[1], 0)
    pen.rectangle((x, y, x + width, y + height), fill=colour)
    pen.text((x + 2, y + 1), text, fill='black')


def images_of(paths: list[str]) -> list[Path]:
    """Returns the given files and the image files in the given folders."""
    found: list[Path] = []
    for path in map(Path, paths):
        if not path.exists():
            raise ValueError(f'{path} does not exist. Give images or folders of images')
        images = (f for f in path.iterdir() if f.suffix.lower() in SUFFIXES and f.is_file())
        found += sorted(images) if path.is_dir() else [path]
    if not found:
        raise ValueError(f'no image in {" ".join(paths)}. Give a folder of files that end in {", ".join(SUFFIXES)}')
    return found


def run(model: Model, paths: list[Path], out: Path, threshold: float) -> None:
    pictures = names_for(paths, out)
    out.mkdir(parents=True, exist_ok=True)
    predictions: dict[str, dict[str, list]] = {}
    failed = []
    for path, picture in zip(paths, pictures, strict=True):
        try:
            image = Image.open(path)
            image.load()
            found = predictions[str(path)] = model(image)
        except (OSError, ValueError, Image.DecompressionBombError) as error:
            failed.append(f'{path}: {error}')
            continue
        draw(image, found, threshold).save(picture)
    (out / 'predictions.json').write_text(json.dumps(predictions, indent=1))
    print(f'wrote {out / "predictions.json"} and {len(predictions)} annotated images')
    if failed:
        raise ValueError('\n'.join([f'{len(failed)} of {len(paths)} images could not be used:', *failed]))


def names_for(paths: list[Path], out: Path) -> list[Path]:
    """Returns a file name for the annotated version of each image, and makes sure that no image is overwritten."""
    names: list[Path] = []
    for path in paths:
        name = out / f'{path.stem}.png'
        names.append(name if name not in names else out / f'{path.stem}-{len(names)}.png')
    images = {path.resolve() for path in paths}
    if lost := [name for name in names if name.resolve() in images]:
        raise ValueError(f'{lost[0]} is one of the images and would be overwritten. Give another --out')
    return names


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('model')
    parser.add_argument('images', nargs='+', metavar='IMAGE', help='image files, or folders of images')
    parser.add_argument('--out', required=True, type=Path, metavar='DIR')
    parser.add_argument(
        '--score',
        type=float,
        default=0.3,
        help='lowest score of boxes that are drawn (default: %(default)s); predictions.json has all boxes',
    )
    args = parser.parse_args(arguments)
    try:
        run(Model(args.model), images_of(args.images), args.out, args.score)
    except (OSError, ValueError) as error:
        sys.exit(f'error: {error}')


if __name__ == '__main__':
    main()
