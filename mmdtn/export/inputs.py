"""Describes how a model's test pipeline prepares an image, in plain data that predict.py can read."""

from typing import Any

import torch
from mmcv.transforms import CenterCrop, LoadAnnotations, LoadImageFromFile, Resize
from mmengine.config import Config
from mmengine.registry import DATASETS, TRANSFORMS
from torch import Tensor

from mmdtn.errors import UserError
from mmdtn.registry import class_of


def dataset_of(cfg: Config) -> dict[str, Any]:
    loader = cfg.get('test_dataloader')
    if not loader:
        raise UserError('The config has no test_dataloader. Add one, as its pipeline defines how images are prepared.')
    dataset = loader.dataset
    while 'dataset' in dataset:
        dataset = dataset.dataset
    return dataset


def reads_bgr(cfg: Config) -> bool:
    """Tells whether a model reads BGR images. Image files are read as BGR, but arrays such as CIFAR's are RGB."""
    return any(issubclass(class_of(step, TRANSFORMS), LoadImageFromFile) for step in dataset_of(cfg)['pipeline'])


def turns_colours(preprocessor: Any, mean: Tensor, std: Tensor) -> bool:
    """Tells whether a data preprocessor that normalises with ``mean`` and ``std`` reverses the order of colours."""
    ramp = torch.tensor([0, 100, 200], dtype=torch.uint8).view(3, 1, 1).expand(3, 64, 64)
    given = preprocessor(dict(inputs=[ramp], data_samples=None))['inputs'] * std + mean
    return bool(given[0, 0, 0, 0] > given[0, 2, 0, 0])


def steps_of(cfg: Config) -> list[dict[str, Any]]:
    """Describes the steps of the test pipeline between loading and packing an image."""
    return [step for settings in dataset_of(cfg)['pipeline'] if (step := _step(settings))]


def _step(settings: dict[str, Any]) -> dict[str, Any] | None:
    kind = class_of(settings, TRANSFORMS)
    if issubclass(kind, LoadAnnotations) or kind.__name__.startswith('Pack'):
        return None
    step = TRANSFORMS.build(settings)
    if issubclass(kind, LoadImageFromFile):
        if step.color_type != 'color':
            raise UserError(f'The test pipeline has {step}, but predict.py reads colour images only. Use --raw.')
        return None
    if issubclass(kind, CenterCrop) and not step.auto_pad:
        return dict(do='crop', size=list(step.crop_size))
    resampling = dict(backend=getattr(step, 'backend', None), interpolation=getattr(step, 'interpolation', None))
    if resampling['backend'] == 'pillow' or resampling == dict(backend='cv2', interpolation='bilinear'):
        if issubclass(kind, Resize) and step.scale is not None:
            return dict(do='resize', scale=list(step.scale), keep_ratio=step.keep_ratio, **resampling)
        if kind.__name__ == 'ResizeEdge':
            return dict(do='resize_edge', scale=step.scale, edge=step.edge, **resampling)
    raise UserError(
        f'The test pipeline has {step}, which predict.py does not support. It supports CenterCrop, and Resize to a '
        "scale and ResizeEdge with pillow or with cv2's bilinear interpolation. Change the pipeline, or use --raw."
    )


def classes_of(cfg: Config) -> tuple[str, ...]:
    """Returns the class names of the config's test data set, or an empty tuple if it names none."""
    dataset = dataset_of(cfg)
    metainfo = dataset.get('metainfo') or getattr(class_of(dataset, DATASETS), 'METAINFO', {})
    classes = metainfo.get('classes') or ()
    return () if isinstance(classes, str) else tuple(classes)  # a string would be the path of a file
