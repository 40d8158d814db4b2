"""Checks the datasets of a run before use, and reports each fault with its file and id."""

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from mmengine.dataset import BaseDataset
from mmengine.dist import broadcast_object_list, get_rank, is_main_process
from mmengine.registry import DATASETS
from mmengine.runner import Runner

from mmdtn.engine.faults import DataError, coco_faults, image_fault, without_unreadable
from mmdtn.files import write_whole
from mmdtn.registry import class_of

SHOWN = 20  # number of faults that a message lists


def check_data(runner: Runner, names: tuple[str, ...], strict: bool = False) -> None:
    """Checks the datasets of a runner's loaders before the run reads them.

    Annotation files are checked because MMDetection silently drops annotations that it cannot use. Broken images are
    removed from validation and test sets here, because samplers and metrics rely on a fixed dataset length. Training
    sets are large, so SkipBrokenImagesHook checks each training image when it is loaded.

    Args:
        runner: Runner that has not started.
        names: The loaders to check: ``'train'``, ``'val'`` or ``'test'``.
        strict: Whether to raise an error at the first fault.
    """
    # Maps an annotation file and its classes to the repaired copy, or to None.
    checked: dict[tuple[str, tuple[str, ...]], str | None] = {}
    for name in names:
        loader = getattr(runner, f'_{name}_dataloader')  # settings only; the public property would build the loader
        if not isinstance(loader, dict) or not isinstance(loader.get('dataset'), dict):
            continue
        for dataset, path, classes in _annotation_files(loader['dataset']):
            if (path, classes) not in checked:
                checked[path, classes] = _report_annotations(runner, path, classes, strict)
            if readable := checked[path, classes]:
                dataset['ann_file'] = readable
                _replace_annotation_file(getattr(runner, f'_{name}_evaluator', None), path, readable)
        if name != 'train':
            loader['dataset'] = _without_broken_images(runner, DATASETS.build(loader['dataset']), strict)


def _annotation_files(dataset: Any) -> Iterator[tuple[Any, str, tuple[str, ...]]]:
    """Yields each dataset's config, annotation file and classes. Wrapped datasets are included."""
    if isinstance(dataset, list | tuple):
        for part in dataset:
            yield from _annotation_files(part)
    elif isinstance(dataset, dict):
        path = dataset.get('ann_file')
        if isinstance(path, str) and path.endswith('.json') and not dataset.get('backend_args'):
            path = os.path.join(dataset.get('data_root') or '', path)
            if '://' not in path:
                yield dataset, path, _classes(dataset)
        yield from _annotation_files(dataset.get('dataset'))
        yield from _annotation_files(dataset.get('datasets'))


def _classes(dataset: Any) -> tuple[str, ...]:
    """Returns the class names that MMDetection looks for in a COCO file."""
    kind = class_of(dataset, DATASETS)
    coco = next((base for base in kind.__mro__ if base.__name__ == 'CocoDataset'), None)
    if coco is None or kind.load_data_list is not coco.load_data_list:
        return ()  # other datasets, such as LVIS, find their categories differently
    classes = (dataset.get('metainfo') or {}).get('classes') or kind.METAINFO.get('classes') or ()
    return () if isinstance(classes, str) else tuple(classes)  # a string is the path of a file


def _report_annotations(runner: Runner, path: str, classes: tuple[str, ...], strict: bool) -> str | None:
    """Logs the faults of an annotation file. Returns a repaired copy if MMDetection cannot read the file."""
    result: list[Any] = [None, None]  # an error that stops the run, and the list of faults
    if is_main_process():  # one process reads the file and shares the result
        try:
            result[1] = coco_faults(path, classes)
        except (DataError, OSError) as error:
            result[0] = error
    stop, faults = broadcast(result)
    if stop is not None:
        raise stop
    if not faults:
        return None
    message = f'{path} has {len(faults)} faults:{listed(faults)}'
    if strict:
        raise DataError(message)
    runner.logger.warning(f'{message}\nThey are ignored. Use --strict to stop instead.')
    copy: list[Any] = [None]
    if is_main_process() and classes and (content := without_unreadable(path)):
        parts = Path(path).resolve().parts[1:]  # the folders keep files of the same name apart
        copy[0] = str(Path(runner.log_dir, 'annotations', *parts).absolute())
        write_whole(copy[0], json.dumps(content))
    return broadcast(copy)[0]


def _replace_annotation_file(evaluator: Any, path: str, readable: str) -> None:
    """Replaces the annotation file in the settings of the metrics that read it."""
    for metric in evaluator if isinstance(evaluator, list) else [evaluator]:
        named = metric.get('ann_file') if isinstance(metric, dict) else None
        if named and os.path.realpath(named) == os.path.realpath(path):
            metric['ann_file'] = readable


def listed(faults: list[str]) -> str:
    """Formats the first faults, one per line, and the number of remaining faults."""
    more = f'\n  and {len(faults) - SHOWN} more' if len(faults) > SHOWN else ''
    return ''.join(f'\n  {fault}' for fault in faults[:SHOWN]) + more


def _without_broken_images(runner: Runner, dataset: Any, strict: bool) -> Any:
    if hasattr(dataset, 'full_init'):
        dataset.full_init()
    if not isinstance(dataset, BaseDataset) or not is_local(dataset):
        return dataset
    found: list[Any] = [{}, 0]  # descriptions of broken images by index, and the number of objects in them
    if is_main_process():
        with ThreadPoolExecutor(16) as pool:
            infos = [dataset.get_data_info(i) for i in range(len(dataset))]
            faults = pool.map(lambda info: image_fault(info['img_path']) if has_local_file(info) else None, infos)
            found[0] = {i: describe(infos[i], fault) for i, fault in enumerate(faults) if fault}
            found[1] = sum(len(infos[i].get('instances', ())) for i in found[0])
    broken, objects = broadcast(found)
    if not broken:
        return dataset
    if strict:
        raise DataError(f'{len(broken)} images cannot be used. The first is {next(iter(broken.values()))}')
    if len(broken) == len(dataset):
        raise DataError(f'none of the {len(broken)} images can be used. The first is {next(iter(broken.values()))}')
    message = f'{len(broken)} of {len(dataset)} evaluation images cannot be used and are left out.'
    if objects:
        message += f' Metrics that read an annotation file, such as CocoMetric, count {objects} objects as missed.'
    runner.logger.warning(message)
    for line in broken.values():
        note(runner.log_dir, line)
    dataset.get_subset_([i for i in range(len(dataset)) if i not in broken])
    return dataset


def broadcast(found: list[Any]) -> list[Any]:
    """Sends the values of the main process to all processes, and returns them."""
    broadcast_object_list(found)
    return found


def describe(info: dict, fault: str) -> str:
    return f'{info["img_path"]} (id {info.get("img_id", info.get("sample_idx"))}): {fault}'


def note(log_dir: str, line: str) -> None:
    """Appends a line to this process's list of skipped images.

    Data workers are separate processes that may be killed at any time. A short line is appended completely or not at
    all.
    """
    with open(os.path.join(log_dir, f'skipped_images_{get_rank()}.txt'), 'a') as file:
        file.write(line + '\n')


def is_local(dataset: BaseDataset) -> bool:
    """Returns whether the dataset and its pipeline read local image files."""
    return not any(getattr(part, 'backend_args', None) for part in (dataset, *dataset.pipeline.transforms))


def has_local_file(info: dict) -> bool:
    return isinstance(info.get('img_path'), str) and '://' not in info['img_path']
