"""Chooses images for an analysis, runs a trained model on them and records tokens and predictions."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mmcv
import mmengine
import numpy as np
import torch
from mmcv.transforms import LoadAnnotations, LoadImageFromFile
from mmengine.dataset import Compose
from mmengine.registry import DATASETS, FUNCTIONS, TRANSFORMS

from mmdtn.backbones.base import Backbone
from mmdtn.errors import UserError
from mmdtn.models import TrainedModel, enter_scope
from mmdtn.registry import class_of

from .capture import BlockTokens, Capture

SPLITS = ('train', 'val', 'test')
SUFFIXES = ('.jpg', '.jpeg', '.png', '.bmp', '.webp', '.tif', '.tiff')
BARE_SIDE = 224  # side of the images for a backbone without a data pipeline


@dataclass
class Seen:
    """One image with the tokens of all blocks and the model's predictions."""

    name: str
    picture: np.ndarray  # RGB image on which predictions are drawn
    blocks: list[BlockTokens]
    sample: Any  # data sample with predictions and any annotations; None for a bare backbone

    def without_padding(self, values: np.ndarray) -> np.ndarray:
        """Crops a ``height x width`` map of the model's padded input to the part that shows the image."""
        if self.sample is None or 'img_shape' not in self.sample or 'batch_input_shape' not in self.sample:
            return values
        sizes = zip(values.shape, self.sample.img_shape, self.sample.batch_input_shape, strict=False)
        height, width = (math.ceil(cells * image / padded) for cells, image, padded in sizes)
        return values[:height, :width]


def choose_images(trained: TrainedModel, where: str, number: int) -> list[dict]:
    """Chooses up to ``number`` evenly spaced images of a data set and returns them as inputs for a data pipeline.

    ``where`` is a folder, a COCO annotation file, or the name of one of the config's splits.
    """
    path = Path(where)
    if path.is_dir():
        files = sorted(f for f in path.rglob('*') if f.suffix.lower() in SUFFIXES)
        if not files:
            raise UserError(f'{path} has no images. Give a folder of files that end in {", ".join(SUFFIXES)}.')
        return [dict(img_path=str(f), img_id=i, sample_idx=i) for i, f in enumerate(_spread(files, number))]
    if where not in SPLITS and not path.is_file():
        raise UserError(
            f'--images {where} does not exist. Give a folder, a COCO annotation file, or one of {", ".join(SPLITS)}.'
        )
    loader = trained.cfg.get(f'{where if where in SPLITS else "test"}_dataloader')
    if not loader:
        raise UserError(f'{trained.config} has no data for --images {where}. Give a folder of images.')
    settings = loader.dataset
    while 'dataset' in settings:
        settings = settings.dataset
    settings = dict(settings, pipeline=[], test_mode=True)  # test_mode also keeps images without objects
    if path.is_file():
        settings |= dict(ann_file=str(path), data_root='', data_prefix=dict(img=str(_image_folder(path))))
    enter_scope(trained.cfg)
    dataset = DATASETS.build(settings)
    trained.classes = trained.classes or tuple(dataset.metainfo.get('classes') or ())
    return [dataset.get_data_info(i) for i in _spread(range(len(dataset)), number)]


def _image_folder(annotations: Path) -> Path:
    """Finds the folder with the images of a COCO annotation file.

    The search covers the file's folder, the parent folder, and their direct subfolders.
    """
    content = mmengine.load(annotations, file_format='json')
    if not isinstance(content, dict) or not content.get('images'):
        raise UserError(f'{annotations} is not a COCO annotation file, because it has no list "images".')
    image = content['images'][0]
    folders = [
        folder
        for parent in (annotations.parent, annotations.parent.parent)
        for folder in (parent, *sorted(f for f in parent.iterdir() if f.is_dir()))
        if (folder / image['file_name']).is_file()
    ]
    # Splits often share file names. Prefer a folder whose name occurs in the name of the annotation file, such as val
    # for instances_val.json.
    for folder in sorted(folders, key=lambda f: f.name not in annotations.stem):
        if mmcv.imread(folder / image['file_name']).shape[:2] == (image['height'], image['width']):
            return folder
    raise UserError(
        f'{annotations} lists {image["file_name"]} with {image["width"]} x {image["height"]} pixels, but there is no '
        f'such image in {annotations.parent.parent} or its folders. Move the annotations next to the images.'
    )


def _spread(all_of: Any, number: int) -> list:
    count = min(number, len(all_of))
    return [all_of[i * len(all_of) // count] for i in range(count)]


def look(trained: TrainedModel, images: list[dict]) -> Iterator[Seen]:
    """Runs the model on the images one by one and yields the results."""
    enter_scope(trained.cfg)
    run = _look_with_pipeline if trained.cfg.get('test_dataloader') else _look_bare
    if isinstance(trained.model, Backbone):
        run = _look_bare
    with torch.no_grad():
        for image in images:
            yield run(trained, dict(image))


def _look_with_pipeline(trained: TrainedModel, image: dict) -> Seen:
    settings = trained.cfg.test_dataloader.dataset
    while 'dataset' in settings:
        settings = settings.dataset
    steps = [s for s in settings.pipeline if 'instances' in image or not _is(LoadAnnotations, s)]
    if 'img' in image:
        steps = [step for step in steps if not _is(LoadImageFromFile, step)]
    elif not any(_is(LoadImageFromFile, step) for step in steps):
        steps = [dict(type=LoadImageFromFile), *steps]
    data = Compose(steps)(image)
    collate = FUNCTIONS.get(trained.cfg.test_dataloader.get('collate_fn', dict(type='pseudo_collate'))['type'])
    with Capture(trained.model) as seen:
        (sample,) = trained.model.test_step(collate([data]))
    to_rgb = (trained.cfg.get('data_preprocessor') or {}).get('to_rgb', False)
    if 'pred_instances' in sample:
        picture = mmcv.imread(sample.img_path, channel_order='rgb')
    else:
        picture = data['inputs'].permute(1, 2, 0).numpy()
        picture = picture[..., ::-1] if getattr(trained.model.data_preprocessor, 'to_rgb', to_rgb) else picture
    return Seen(_name(image), np.ascontiguousarray(picture), seen.blocks, sample)


def _is(kind: type, step: dict) -> bool:
    return issubclass(class_of(step, TRANSFORMS), kind)


def _look_bare(trained: TrainedModel, image: dict) -> Seen:
    if 'img_path' not in image:
        raise UserError('A model without a data pipeline can only be run on files. Give a folder of images.')
    picture = mmcv.imresize(mmcv.imread(image['img_path'], channel_order='rgb'), (BARE_SIDE, BARE_SIDE))
    mean, std = torch.tensor([123.675, 116.28, 103.53]), torch.tensor([58.395, 57.12, 57.375])
    x = ((torch.from_numpy(picture) - mean) / std).permute(2, 0, 1)[None]
    with Capture(trained.model) as seen:
        trained.model(x)
    return Seen(_name(image), picture, seen.blocks, None)


def _name(image: dict) -> str:
    return Path(image['img_path']).name if image.get('img_path') else f'image {image.get("sample_idx", 0)}'
