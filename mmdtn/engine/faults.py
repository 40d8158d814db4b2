"""Finds faults in annotation files and images."""

import json
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from mmdtn.errors import UserError, nearest

ENDS = dict(JPEG=b'\xff\xd9', PNG=b'IEND\xae\x42\x60\x82')


class DataError(UserError):
    """Raised for unusable data. With ``--strict``, data that would otherwise be left out also raises the error."""


def coco_faults(path: str, classes: Sequence[str] = ()) -> list[str]:
    """Returns a description of each fault in a COCO annotation file.

    Raises ``DataError`` if nothing in the file can be used.

    No faults are reported for JSON files in other formats, or for COCO files of captions, panoptic segments or
    unannotated test images.

    Args:
        path: The annotation file.
        classes: The class names of the config if its dataset reads COCO files, otherwise empty.
    """
    try:
        content = json.loads(Path(path).read_bytes())
    except ValueError as error:
        raise DataError(f'{path} is not JSON: {error}') from None
    if isinstance(content, list) and classes:
        raise DataError(
            f'{path} is a list, but a COCO file is a dict with images, annotations and categories. Put the list into '
            'such a dict, or choose a dataset that reads lists.'
        )
    if not isinstance(content, dict) or not _annotates_boxes(content):
        return []
    if lacking := [key for key in ('images', 'categories') if key not in content]:
        raise DataError(f'{path} lacks {", ".join(lacking)}: a COCO file has images, annotations and categories.')
    if not content['images']:
        raise DataError(f'{path} has no images.')
    if without := [a['id'] for a in content['annotations'] if 'area' not in a]:
        raise DataError(
            f'{path}: {len(without)} annotations have no "area", which MMDetection needs. The first has the id '
            f'{without[0]}. Without a mask, use the width times the height of the box.'
        )
    _check_classes(path, [category['name'] for category in content['categories']], classes)
    faults = []
    images = {image['id']: image for image in content['images']}
    categories = {category['id'] for category in content['categories']}
    for image in images.values():
        if min(image.get('width', 1), image.get('height', 1)) <= 0:
            faults.append(f'image {image["id"]} ({_name(image)}) is {image["width"]} x {image["height"]} pixels')
    repeated = [i for i, count in Counter(a['id'] for a in content['annotations']).items() if count > 1]
    faults += [f'annotation id {i} is used more than once' for i in repeated]
    for annotation in content['annotations']:
        image = images.get(annotation['image_id'])
        name = _name(image) if image else 'not in the file'
        where = f'annotation {annotation["id"]} of image {annotation["image_id"]} ({name})'
        if image is None:
            faults.append(where)
        if annotation['category_id'] not in categories:
            known = f'{min(categories)} to {max(categories)}' if categories else 'none'
            faults.append(f'{where} has category {annotation["category_id"]}; the file defines {known}')
        box: Any = annotation.get('bbox')
        if not _is_box(box):
            faults.append(f'{where} has no box of four numbers, but {box}')
        elif not (box[2] > 0 and box[3] > 0):  # NaN too
            faults.append(f'{where} is {box[2]} x {box[3]} pixels')
    return faults


def without_unreadable(path: str) -> dict[str, Any] | None:
    """Returns the content of a COCO file without the annotations that MMDetection cannot read.

    MMDetection fails on boxes that are not four numbers, and on repeated annotation ids. MMDetection itself skips other
    faulty annotations. Returns None if all annotations can be read.
    """
    content = json.loads(Path(path).read_bytes())
    readable = {a['id']: a for a in reversed(content['annotations']) if _is_box(a.get('bbox'))}
    if len(readable) == len(content['annotations']):
        return None
    return dict(content, annotations=[*reversed(readable.values())])


def _is_box(box: Any) -> bool:
    return isinstance(box, list) and len(box) == 4 and all(isinstance(side, int | float) for side in box)


def _check_classes(path: str, categories: list[str], classes: Sequence[str]) -> None:
    """Checks that the file lists the classes of the config in the same order.

    MMDetection numbers the classes in the order of the file and ignores the order of the config.
    """
    names = ', '.join(categories[:9]) + (', ...' if categories[9:] else '')
    for name in classes:
        if name not in categories:
            raise DataError(
                f'{path} has no category {name!r}{nearest(name, categories)}. Its categories are {names}. Give the '
                'dataset metainfo=dict(classes=...) with these names. By default it has the classes of COCO.'
            )
    order = tuple(name for name in categories if name in classes)
    if classes and order != tuple(classes):
        raise DataError(
            f'{path} has its categories in another order than the config. MMDetection uses the order of the file, so '
            f'labels would get wrong names. Give the dataset metainfo=dict(classes={order}).'
        )


def _annotates_boxes(content: dict) -> bool:
    """Returns whether the first annotation has the keys of COCO's object annotations."""
    annotations = content.get('annotations')
    return isinstance(annotations, list) and all({'id', 'image_id', 'category_id'} <= set(a) for a in annotations[:1])


def _name(image: dict) -> str:
    return image.get('file_name') or image.get('coco_url') or 'without a name'  # LVIS has URLs instead of file names


def image_fault(path: str) -> str | None:
    """Returns the reason why an image file is unusable, or None for a complete file.

    For most files, only the first and last bytes are read. Truncated JPEG files must be found here, because some
    versions of OpenCV decode them and fill the missing part with grey.
    """
    try:
        if os.path.getsize(path) == 0:
            return 'the file is empty'
        with Image.open(path) as image:
            kind = image.format
        with open(path, 'rb') as file:
            file.seek(-min(64, os.path.getsize(path)), os.SEEK_END)
            if kind in ENDS and ENDS[kind] in file.read():
                return None
    except OSError as error:
        return _reason(error)
    except Image.DecompressionBombError:
        return None  # OpenCV can read larger images than Pillow
    return decoding_fault(path)  # the format has no end marker, or the marker is not at the end


def decoding_fault(path: str) -> str | None:
    try:
        with Image.open(path) as image:
            image.load()
    except Exception as error:  # decoders raise various exceptions
        return _reason(error)
    return None


def _reason(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return 'there is no such file'
    return (getattr(error, 'strerror', None) or str(error)).partition(" '")[0]
