"""Tests a model on clean and corrupted images with the metrics of its config.

A cell is one corruption at one severity. The results of all cells are stored in ``cells.json``.
"""

import copy
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from mmengine.config import Config
from mmengine.dataset import Compose
from mmengine.dist import master_only
from mmengine.evaluator import Evaluator
from mmengine.registry import DATASETS, METRICS
from mmengine.runner import Runner

from mmdtn.datasets.corruption import GROUPS, with_corruption
from mmdtn.engine.data_checks import check_data
from mmdtn.engine.launch import add_hook, build_runner
from mmdtn.errors import UserError
from mmdtn.files import write_whole
from mmdtn.registry import class_of

from .robustness import SubsetAccuracy, imagenet_folders

CLEAN = 'clean'
Cells = dict[str, dict[str, float]]  # measured metrics, by 'clean' or 'corruption/severity'


def cell_name(corruption: str, severity: int) -> str:
    return f'{corruption}/{severity}'


@dataclass
class CellFile:
    """The file ``cells.json``, which stores the finished cells of each model. The file is rewritten after each cell."""

    path: Path
    models: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path) -> 'CellFile':
        return cls(path, json.loads(path.read_text()) if path.exists() else {})

    def cells_of(self, label: str, made_with: dict[str, Any]) -> Cells:
        """Returns the cells of a model. Raises an error if existing cells were measured with different settings."""
        model = self.models.setdefault(label, dict(made_with=made_with, cells={}))
        for key, value in made_with.items():
            if model['made_with'].get(key) != value:
                raise UserError(
                    f'{self.path} has cells of {label} with {key} {model["made_with"].get(key)} instead of {value}. '
                    'Give another --out.'
                )
        return model['cells']

    @master_only
    def save(self) -> None:
        write_whole(self.path, json.dumps(self.models, indent=1) + '\n')


def digest(checkpoint: str) -> str:
    return checkpoint if '://' in checkpoint else _short(Path(checkpoint).read_bytes())


def settings_digest(cfg: Config) -> str:
    """Returns a hash of the settings that affect the results of a cell."""
    decides = cfg.model, cfg.test_dataloader.dataset, cfg.test_evaluator
    return _short(json.dumps(decides, sort_keys=True, default=repr).encode())


def _short(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


class CellTester:
    """Tests a model cell by cell on its whole test set or on a limited number of images."""

    def __init__(self, cfg: Config, checkpoint: str, strict: bool = False, pictures: int | None = None) -> None:
        self.cfg = copy.deepcopy(cfg)
        self.cfg.load_from, self.cfg.resume = checkpoint, False
        add_hook(self.cfg, type='CheckWeightsHook')
        if 'pipeline' not in self.cfg.test_dataloader.dataset:
            raise UserError(
                'The test data set has no pipeline, because it wraps other data sets. Use a data set with a pipeline '
                'of its own in test_dataloader.'
            )
        self.pipeline, self.pictures = self.cfg.test_dataloader.dataset.pipeline, pictures
        with TemporaryDirectory() as folder:  # every process uses its own directory
            annotated = pictures is not None and _fewer_annotated_pictures(self.cfg, pictures, Path(folder))
            self.runner: Runner = build_runner(self.cfg)
            check_data(self.runner, ('test',), strict)
            self.loop: Any = self.runner.test_loop
        self.dataset = self.loop.dataloader.dataset
        if not annotated:
            self._leave_some(self.dataset)
        self.evaluator = self.loop.evaluator
        self.runner.call_hook('before_run')
        self.runner.load_or_resume()

    def clean(self) -> dict[str, float]:
        return self._test(self.dataset, self.pipeline)

    def corrupted(self, name: str, severity: int) -> dict[str, float]:
        """Tests the model on the test set, whose images are corrupted while they are loaded."""
        return self._test(self.dataset, with_corruption(self.pipeline, name, severity))

    def stored(self, folder: Path) -> dict[str, float]:
        """Tests the model on the stored images of one cell, which are in class folders.

        If the images already have the size that the test pipeline produces, they are neither resized nor cropped.
        """
        there = self._folders(folder)
        own = self.dataset.metainfo.get('classes') or ()
        if len(there.metainfo['classes']) != len(own):
            raise UserError(
                f'{folder} has {len(there.metainfo["classes"])} class folders, but the test set of the config has '
                f'{len(own)} classes. Both numbers must be equal, because labels are the indices of folders.'
            )
        finished = [self.pipeline[0], self.pipeline[-1]]
        resized, stored = (_size(self.pipeline, self.dataset), _size(finished, there))
        return self._test(there, finished if stored == resized else self.pipeline)

    def renditions(self, folder: Path) -> dict[str, float]:
        """Tests a classifier on class folders of some of its classes, and on the same classes of the clean test set."""
        there = self._folders(folder)
        names = list(there.metainfo['classes'])
        own = list(self.dataset.metainfo.get('classes') or ())
        outputs = own if set(names) <= set(own) else list(imagenet_folders())
        if unknown := [name for name in names if name not in outputs]:
            raise UserError(
                f'{folder}/{unknown[0]} is neither a class of the test set nor a class folder of ImageNet. Rename or '
                'remove the folder.'
            )
        if own and len(own) != len(outputs):
            raise UserError(f'{folder} has classes of ImageNet, but the classifier has {len(own)} other classes.')
        found = self._test(there, self.pipeline, SubsetAccuracy(outputs=outputs))
        clean = self._test(self.dataset, self.pipeline, SubsetAccuracy(names, outputs))
        return {
            f'{which}_{key.removeprefix("subset/")}': value
            for which, measured in (('renditions', found), ('clean', clean))
            for key, value in measured.items()
        }

    def close(self) -> None:
        self.runner.call_hook('after_run')

    def _folders(self, root: Path) -> Any:
        if not root.is_dir():
            raise UserError(f'{root} does not exist or is not a directory. Give a directory of class folders.')
        dataset = DATASETS.build(dict(type='mmpretrain.CustomDataset', data_root=str(root), pipeline=[]))
        self._leave_some(dataset)
        return dataset

    def _leave_some(self, dataset: Any) -> None:
        if self.pictures is not None and self.pictures < len(dataset):
            dataset.get_subset_(_evenly(len(dataset), self.pictures))

    def _test(self, dataset: Any, pipeline: Sequence[dict], metric: Any = None) -> dict[str, float]:
        dataset.pipeline = Compose(list(pipeline))
        # Build a new loader for each cell, because persistent workers would keep the previous pipeline.
        loader = dict(self.cfg.test_dataloader, dataset=dataset)
        self.loop.dataloader = self.runner.build_dataloader(loader)
        self.loop.evaluator = self.evaluator if metric is None else Evaluator(metric)
        self.loop.evaluator.dataset_meta = dataset.metainfo
        measured = self.loop.run()
        if not measured:  # MMDetection's COCO metric returns nothing if no image has a detection
            kinds = ((m.prefix, kind) for m in self.loop.evaluator.metrics for kind in getattr(m, 'metrics', ()))
            measured = {f'{prefix}/{kind}_mAP': 0.0 for prefix, kind in kinds}
        return {key: float(value) for key, value in measured.items()}


def _size(pipeline: Sequence[dict], dataset: Any) -> tuple[int, ...]:
    """Returns the height and width of the first image that the pipeline produces."""
    return tuple(Compose(list(pipeline))(dataset.get_data_info(0))['inputs'].shape[-2:])


def stored_cells(root: Path, names: Sequence[str], severities: Sequence[int]) -> Iterator[tuple[str, int, Path]]:
    """Yields the corruption, severity and folder of each stored cell of ImageNet-C.

    The folders ``CORRUPTION/SEVERITY`` are in ``root`` or in the group folders that the archives contain.
    """
    group_of = {name: group for group, members in GROUPS.items() for name in members}
    for name in names:
        places = [root / name, root / group_of[name] / name]
        found = next((place for place in places if place.is_dir()), None)
        if found is None:
            raise UserError(
                f'{root} has neither {name}/ nor {group_of[name]}/{name}/. Give the folder of the extracted archives.'
            )
        for severity in severities:
            yield name, severity, found / str(severity)


def _evenly(total: int, wanted: int) -> list[int]:
    """Returns evenly spaced indices, because images in class folders are sorted by class."""
    return np.linspace(0, total - 1, min(wanted, total)).round().astype(int).tolist()


def _fewer_annotated_pictures(cfg: Config, pictures: int, folder: Path) -> bool:
    """Replaces the annotation file of a COCO test set with one that has fewer images.

    Returns False for other test sets.

    COCO's metric counts the objects of all annotated images, so only tested images may have annotations.
    """
    evaluators = cfg.test_evaluator if isinstance(cfg.test_evaluator, list) else [cfg.test_evaluator]
    annotated = [e for e in evaluators if 'ann_file' in e and 'CocoMetric' in str(class_of(e, METRICS))]
    if not annotated:
        return False
    content = json.loads(Path(annotated[0].ann_file).read_text())
    images = sorted(content['images'], key=lambda image: image['id'])
    content['images'] = [images[i] for i in _evenly(len(images), pictures)]
    kept = {image['id'] for image in content['images']}
    content['annotations'] = [a for a in content['annotations'] if a['image_id'] in kept]
    file = folder / f'{pictures}_pictures.json'
    file.write_text(json.dumps(content))
    cfg.test_dataloader.dataset.ann_file = str(file)
    for evaluator in annotated:
        evaluator.ann_file = str(file)
    return True
