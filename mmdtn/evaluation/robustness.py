"""What corruptions cost: ImageNet-C's errors, COCO-C's APs, and the accuracy on the classes of ImageNet-R.

Errors are shares, from 0 to 1. Two numbers go by the name of mCE: the mean of a model's plain errors, here
``mean_error``, which the paper of DTN has in its Table 6; and what ImageNet-C's authors defined, in AlexNet's errors.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any

import numpy as np
from mmengine.evaluator import BaseMetric
from mmengine.registry import METRICS

from mmdtn.datasets.corruption import BENCHMARK

# Top-1 errors of AlexNet, means of the five severities, as published with ImageNet-C.
ALEXNET = dict(
    gaussian_noise=0.886428,
    shot_noise=0.894468,
    impulse_noise=0.922640,
    defocus_blur=0.819880,
    glass_blur=0.826268,
    motion_blur=0.785948,
    zoom_blur=0.798360,
    snow=0.866816,
    frost=0.826572,
    fog=0.819324,
    brightness=0.564592,
    contrast=0.853204,
    elastic_transform=0.646056,
    pixelate=0.717840,
    jpeg_compression=0.606500,
    speckle_noise=0.845388,
    gaussian_blur=0.787108,
    spatter=0.717512,
    saturate=0.658248,
)
BySeverity = Mapping[str, Sequence[float]]  # for each corruption a value for each severity


def mean_error(errors: BySeverity) -> float:
    """Plain mean over all corruptions and severities."""
    return float(np.mean([np.mean(values) for values in errors.values()]))


def corruption_error(name: str, errors: Sequence[float]) -> float:
    """CE in percent: the errors at the five severities, in units of AlexNet's."""
    if len(errors) != 5:
        raise ValueError(f'CE of {name} is of all five severities, but got {len(errors)} errors.')
    return 100 * float(np.mean(errors)) / ALEXNET[name]


def mean_corruption_error(errors: BySeverity) -> float:
    """mCE in percent: the mean of the corruptions' CE."""
    return float(np.mean([corruption_error(name, values) for name, values in errors.items()]))


def is_whole_benchmark(values: BySeverity) -> bool:
    """Whether a mean over these may be called by the benchmark's name: its 15 corruptions, in five severities each."""
    return set(values) == set(BENCHMARK) and all(len(v) == 5 for v in values.values())


def performance(clean: float, corrupted: BySeverity) -> dict[str, float]:
    """COCO-C's three numbers of a metric that is better when higher: P, mPC, and rPC, what is left of P, in percent."""
    mean = float(np.mean([np.mean(values) for values in corrupted.values()]))
    return dict(P=clean, mPC=mean, rPC=100 * mean / clean if clean else float('nan'))


@cache
def imagenet_folders() -> list[str]:
    """ImageNet's thousand class folders (wnids) in the order of a classifier's outputs."""
    return sorted(resources.files('timm').joinpath('data/_info/imagenet_synsets.txt').read_text().split())


@METRICS.register_module()
class SubsetAccuracy(BaseMetric):
    """Top-1 among some of a classifier's classes, as ImageNet-R is tested: 200 columns of 1000.

    ``top1_of_N`` takes the best of those N columns, ``top1_of_all`` the best of all of the classifier's.

    Args:
        classes: Names of the columns, for data that is labelled by the classifier's outputs: pictures of other classes
            are left out. None takes the class folders of the data set, by which its labels count then.
        outputs: Names of the classifier's outputs, in order; None: ImageNet's thousand.

    Example:
        test_evaluator = dict(type='mmengine.SubsetAccuracy')
    """

    default_prefix = 'subset'

    def __init__(
        self, classes: Sequence[str] | None = None, outputs: Sequence[str] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.classes, self.outputs = classes, outputs

    def process(self, data_batch: Any, data_samples: Sequence[dict]) -> None:
        for sample in data_samples:
            scores = np.asarray(sample['pred_score'].cpu())
            outputs = list(self.outputs or imagenet_folders())
            if len(scores) != len(outputs):
                raise ValueError(
                    f'the classifier has {len(scores)} outputs, but outputs= names {len(outputs)}'
                    f'{"" if self.outputs else ", the classes of ImageNet"}.'
                )
            self.results.append((scores, int(sample['gt_label'])))

    def compute_metrics(self, results: list) -> dict[str, float]:
        outputs = list(self.outputs or imagenet_folders())
        place = {name: i for i, name in enumerate(outputs)}
        by_folder = self.classes is None
        assert self.dataset_meta is not None
        names = list(self.dataset_meta['classes'] if self.classes is None else self.classes)
        if unknown := [name for name in names if name not in place]:
            raise ValueError(f'no output of the classifier is {unknown[0]!r}; folders are named as its classes.')
        columns = np.array([place[name] for name in names])
        scores = np.array([score for score, _ in results])
        labels = np.array([columns[label] if by_folder else label for _, label in results])
        kept = np.isin(labels, columns)
        scores, labels = scores[kept], labels[kept]
        best = columns[scores[:, columns].argmax(1)]
        return {
            f'top1_of_{len(columns)}': 100 * float(np.mean(best == labels)),
            'top1_of_all': 100 * float(np.mean(scores.argmax(1) == labels)),
        }
