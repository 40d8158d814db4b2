"""What is wrong with the data, by file and id, before and while it is used."""

import json
import os
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from mmengine.dataset import BaseDataset
from mmengine.dist import broadcast_object_list, get_rank, is_main_process, master_only
from mmengine.hooks import Hook
from mmengine.registry import DATASETS, HOOKS
from mmengine.runner import Runner
from PIL import Image

from .errors import UserError

SHOWN = 20  # faults of a file that a message lists


class DataError(UserError):
    """Data that cannot be used; with ``--strict``, any that would be left out."""


def check_data(runner: Runner, names: tuple[str, ...], strict: bool = False) -> None:
    """Checks what ``names`` (train, val, test) will read, before it is read: the tools call it on a built runner.

    Annotation files are looked at here, because MMDetection leaves out silently what it cannot use. Evaluation sets
    lose their broken images here too: sampler and metric go by their length, so it may not change on the way. Training
    sets are large and drawn at random; their images are checked when they are drawn, by SkipBrokenImagesHook.
    """
    checked: set[str] = set()
    for name in names:
        loader = getattr(runner, f'_{name}_dataloader')
        if not isinstance(loader, dict) or not isinstance(loader.get('dataset'), dict):
            continue
        for path in _annotation_files(loader['dataset']):
            if path not in checked:
                checked.add(path)
                _report_annotations(runner, path, strict)
        if name != 'train':
            loader['dataset'] = _without_broken_images(runner, DATASETS.build(loader['dataset']), strict)


def _annotation_files(dataset: Any) -> Iterator[str]:
    """Of a data set's config and of those that it wraps."""
    if isinstance(dataset, list | tuple):
        for part in dataset:
            yield from _annotation_files(part)
    elif isinstance(dataset, dict):
        path = dataset.get('ann_file')
        if isinstance(path, str) and path.endswith('.json') and not dataset.get('backend_args'):
            path = os.path.join(dataset.get('data_root') or '', path)
            if '://' not in path:
                yield path
        yield from _annotation_files(dataset.get('dataset'))
        yield from _annotation_files(dataset.get('datasets'))


def _report_annotations(runner: Runner, path: str, strict: bool) -> None:
    result: list[Any] = [None, None]  # an error that stops the run, and faults
    if is_main_process():  # one process reads it, all go by what it found
        try:
            result[1] = coco_faults(path)
        except (DataError, OSError) as error:
            result[0] = error
    broadcast_object_list(result)
    stop, faults = result
    if stop is not None:
        raise stop
    if not faults:
        return
    listed = ''.join(f'\n  {fault}' for fault in faults[:SHOWN])
    more = f'\n  and {len(faults) - SHOWN} more' if len(faults) > SHOWN else ''
    message = f'{path} has {len(faults)} faults:{listed}{more}'
    if strict:
        raise DataError(message)
    runner.logger.warning(f'{message}\nThey are left out; --strict stops instead.')


def coco_faults(path: str) -> list[str]:
    """What a COCO annotation file says that cannot be; an error where there is nothing in it to use.

    A JSON file in another format has no faults.
    """
    try:
        content = json.loads(Path(path).read_bytes())
    except ValueError as error:
        raise DataError(f'{path} is not JSON: {error}') from None
    if not isinstance(content, dict) or not {'images', 'annotations', 'categories'} & content.keys():
        return []
    if lacking := [key for key in ('images', 'annotations', 'categories') if key not in content]:
        raise DataError(f'{path} lacks {", ".join(lacking)}: COCO files have images, annotations and categories.')
    if not content['images']:
        raise DataError(f'{path} has no images.')
    faults = []
    images = {image['id']: image for image in content['images']}
    categories = {category['id'] for category in content['categories']}
    for image in images.values():
        if min(image.get('width', 1), image.get('height', 1)) <= 0:
            size = f'{image["width"]} x {image["height"]} pixels'
            faults.append(f'image {image["id"]} ({image["file_name"]}) is {size}')
    repeated = [i for i, count in Counter(a['id'] for a in content['annotations']).items() if count > 1]
    faults += [f'annotation id {i} is used more than once' for i in repeated]
    for annotation in content['annotations']:
        image = images.get(annotation['image_id'])
        name = image['file_name'] if image else 'which is not in the file'
        where = f'annotation {annotation["id"]} of image {annotation["image_id"]} ({name})'
        if image is None:
            faults.append(where)
        if annotation['category_id'] not in categories:
            known = f'{min(categories)} to {max(categories)}' if categories else 'none'
            faults.append(f'{where} has category {annotation["category_id"]}; the file defines {known}')
        box = annotation.get('bbox')
        if box is None or len(box) != 4:
            faults.append(f'{where} has no box of four numbers, but {box}')
        elif not (box[2] > 0 and box[3] > 0):  # NaN too
            faults.append(f'{where} is {box[2]} x {box[3]} pixels')
    return faults


def _without_broken_images(runner: Runner, dataset: Any, strict: bool) -> Any:
    if hasattr(dataset, 'full_init'):
        dataset.full_init()
    if not isinstance(dataset, BaseDataset) or not _is_local(dataset):
        return dataset
    found: list[Any] = [None]
    if is_main_process():
        with ThreadPoolExecutor(16) as pool:
            infos = [dataset.get_data_info(i) for i in range(len(dataset))]
            faults = pool.map(lambda info: image_fault(info['img_path']) if 'img_path' in info else None, infos)
            found = [{i: _describe(infos[i], fault) for i, fault in enumerate(faults) if fault}]
    broadcast_object_list(found)
    broken = found[0]
    if not broken:
        return dataset
    if strict:
        raise DataError(f'{len(broken)} images cannot be used, the first is {next(iter(broken.values()))}')
    if len(broken) == len(dataset):
        raise DataError(f'none of the {len(broken)} images can be used, the first is {next(iter(broken.values()))}')
    for line in broken.values():
        _note(runner.log_dir, line)
    dataset.get_subset_([i for i in range(len(dataset)) if i not in broken])
    return dataset


@HOOKS.register_module()
class SkipBrokenImagesHook(Hook):
    """Draws another training image for one that is missing or broken, and lists all left out at the end of the run.

    Args:
        strict: Stop at the first one instead.
    """

    def __init__(self, strict: bool = False) -> None:
        self.strict = strict

    def before_train(self, runner: Runner) -> None:
        for dataset in _innermost(runner.train_dataloader.dataset):
            if _is_local(dataset):
                # mmengine's data sets draw another sample where this returns None. On the object, not the class, and
                # beneath any data set that wraps it.
                dataset.prepare_data = partial(_prepare, dataset, dataset.prepare_data, runner.log_dir, self.strict)

    def after_run(self, runner: Runner) -> None:
        _report_skipped(runner)


@master_only
def _report_skipped(runner: Runner) -> None:
    files = sorted(Path(runner.log_dir).glob('skipped_images_*.txt'))
    lines = sorted({line for file in files for line in file.read_text().splitlines()})
    if lines:
        listed = ''.join(f'\n  {line}' for line in lines[:SHOWN])
        more = f'\n  and {len(lines) - SHOWN} more' if len(lines) > SHOWN else ''
        runner.logger.warning(f'{len(lines)} images were skipped (see {files[0].parent}):{listed}{more}')


def _prepare(dataset: BaseDataset, prepare: Any, log_dir: str, strict: bool, index: int) -> Any:
    info = dataset.get_data_info(index)
    path = info.get('img_path')
    fault = image_fault(path) if path else None
    if fault is None:
        try:
            return prepare(index)
        except Exception:
            # Anything can fail in a pipeline. It is the image's fault if it does not decode.
            fault = _decoding_fault(path) if path else None
            if fault is None:
                raise
    if strict:
        raise DataError(_describe(info, fault))
    _note(log_dir, _describe(info, fault))
    return None


def _describe(info: dict, fault: str) -> str:
    return f'{info["img_path"]} (id {info.get("img_id", info.get("sample_idx"))}): {fault}'


def _note(log_dir: str, line: str) -> None:
    """Data workers are processes of their own and may be killed; a short line appended to a file arrives whole."""
    with open(os.path.join(log_dir, f'skipped_images_{get_rank()}.txt'), 'a') as file:
        file.write(line + '\n')


def _innermost(dataset: Any) -> Iterator[BaseDataset]:
    if isinstance(dataset, BaseDataset):
        yield dataset
    for part in [getattr(dataset, 'dataset', None), *getattr(dataset, 'datasets', [])]:
        if part is not None:
            yield from _innermost(part)


def _is_local(dataset: Any) -> bool:
    return not getattr(dataset, 'backend_args', None) and '://' not in str(getattr(dataset, 'data_root', ''))


ENDS = dict(JPEG=b'\xff\xd9', PNG=b'IEND\xae\x42\x60\x82')


def image_fault(path: str) -> str | None:
    """Why an image file cannot be used; None for a whole one, at the price of its first and last bytes.

    Not every version of OpenCV refuses half a JPEG file; some fill the rest with grey.
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
    return _decoding_fault(path)  # a format without a mark at its end, or bytes behind it


def _decoding_fault(path: str) -> str | None:
    try:
        with Image.open(path) as image:
            image.load()
    except Exception as error:  # decoders raise what they like
        return _reason(error)
    return None


def _reason(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return 'there is no such file'
    return (getattr(error, 'strerror', None) or str(error)).partition(" '")[0]
