"""Hook that skips broken training images and lists them."""

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

IN_A_ROW = 100  # number of consecutive unusable images that stops the run


@HOOKS.register_module()
class SkipBrokenImagesHook(Hook):
    """Hook that replaces missing and broken training images, and lists them at the end of the run.

    The hook puts a check in front of the pipeline of every dataset, including wrapped datasets. In contrast,
    ``LoadImageFromFile(ignore_empty=True)`` skips files silently and accepts truncated JPEG files.

    Args:
        strict: Whether to stop at the first broken image.
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
    """Pipeline that returns None for an image that cannot be decoded, so that the dataset draws another image.

    All other errors in the pipeline are still raised.
    """

    def __init__(self, pipeline: Compose, log_dir: str, strict: bool) -> None:
        super().__init__(pipeline.transforms)
        self.log_dir, self.strict = log_dir, strict
        self.in_a_row = 0

    def __call__(self, data: dict) -> Any:
        if not has_local_file(data):
            return super().__call__(data)
        image = dict(data)  # a copy, because transforms change `data`
        path = image['img_path']
        fault = image_fault(path)
        if fault is None:
            try:
                self.in_a_row = 0
                return super().__call__(data)
            except Exception:  # transforms raise various exceptions
                fault = decoding_fault(path)
                if fault is None:
                    raise
        if self.strict:
            raise DataError(describe(image, fault))
        note(self.log_dir, describe(image, fault))
        self.in_a_row += 1
        if self.in_a_row == IN_A_ROW:
            raise DataError(f'{IN_A_ROW} training images in a row cannot be used. The last is {describe(image, fault)}')
        return None


@master_only
def _report_skipped(runner: Runner) -> None:
    files = sorted(Path(runner.log_dir).glob('skipped_images_*.txt'))
    lines = sorted({line for file in files for line in file.read_text().splitlines()})
    if lines:
        runner.logger.warning(f'{len(lines)} images were skipped (see {files[0].parent}):{listed(lines)}')


def _innermost(dataset: Any) -> Iterator[BaseDataset]:
    """Yields the datasets that read files, including wrapped ones. MMEngine keeps a sliced dataset in ``_dataset``."""
    if isinstance(dataset, BaseDataset):
        yield dataset
    wrapped = [getattr(dataset, name, None) for name in ('_dataset', 'dataset')]
    for part in [*wrapped, *getattr(dataset, 'datasets', [])]:
        if part is not None:
            yield from _innermost(part)
