"""Broken training images are left out, and named."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mmengine.dataset import BaseDataset, Compose
from mmengine.dist import master_only
from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from mmengine.runner import Runner

from mmdtn.engine.data_checks import describe, has_local_file, is_local, listed, note
from mmdtn.engine.faults import DataError, decoding_fault, image_fault

IN_A_ROW = 100  # pictures that cannot be used; then no picture can


@HOOKS.register_module()
class SkipBrokenImagesHook(Hook):
    """Draws another training image for one that is missing or broken, and lists all left out at the end of the run.

    It puts a check in front of the pipeline of every data set, also of one that another data set wraps.
    (``LoadImageFromFile(ignore_empty=True)`` leaves files out without a word, and takes half a JPEG for a picture.)

    Args:
        strict: Stop at the first one instead.
    """

    priority = 'LOWEST'  # after mmdet's PipelineSwitchHook, whose new pipeline has no check

    def __init__(self, strict: bool = False) -> None:
        self.strict = strict

    def before_train_epoch(self, runner: Runner) -> None:
        for dataset in _innermost(runner.train_dataloader.dataset):
            if is_local(dataset) and not isinstance(dataset.pipeline, WithoutBrokenImages):
                dataset.pipeline = WithoutBrokenImages(dataset.pipeline, runner.log_dir, self.strict)

    def after_run(self, runner: Runner) -> None:
        _report_skipped(runner)


class WithoutBrokenImages(Compose):
    """A pipeline that gives None for an image that does not decode: mmengine's data sets draw another one then.

    Any other error of the pipeline stays an error.
    """

    def __init__(self, pipeline: Compose, log_dir: str, strict: bool) -> None:
        super().__init__(pipeline.transforms)
        self.log_dir, self.strict = log_dir, strict
        self.in_a_row = 0

    def __call__(self, data: dict) -> Any:
        if not has_local_file(data):
            return super().__call__(data)
        image = dict(data)  # the transforms change it
        path = image['img_path']
        fault = image_fault(path)
        if fault is None:
            try:
                self.in_a_row = 0
                return super().__call__(data)
            except Exception:  # anything can fail in a pipeline
                fault = decoding_fault(path)
                if fault is None:
                    raise
        if self.strict:
            raise DataError(describe(image, fault))
        note(self.log_dir, describe(image, fault))
        self.in_a_row += 1
        if self.in_a_row == IN_A_ROW:
            raise DataError(f'{IN_A_ROW} training images in a row cannot be used, the last is {describe(image, fault)}')
        return None


@master_only
def _report_skipped(runner: Runner) -> None:
    files = sorted(Path(runner.log_dir).glob('skipped_images_*.txt'))
    lines = sorted({line for file in files for line in file.read_text().splitlines()})
    if lines:
        runner.logger.warning(f'{len(lines)} images were skipped (see {files[0].parent}):{listed(lines)}')


def _innermost(dataset: Any) -> Iterator[BaseDataset]:
    """The data sets that have files, of those that wrap them; ``_dataset`` is where mmengine keeps a sliced one."""
    if isinstance(dataset, BaseDataset):
        yield dataset
    wrapped = [getattr(dataset, name, None) for name in ('_dataset', 'dataset')]
    for part in [*wrapped, *getattr(dataset, 'datasets', [])]:
        if part is not None:
            yield from _innermost(part)
