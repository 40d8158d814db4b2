"""Metrics of robustness: errors on ImageNet-C, APs on COCO-C, and accuracy on the classes of ImageNet-R.

Errors are between 0 and 1. The literature uses the name mCE for two different metrics. The authors of ImageNet-C divide
the errors by those of AlexNet, as :func:`mean_corruption_error` does. Table 6 of the DTN paper reports the mean of the
plain errors, which :func:`mean_error` computes.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any

import numpy as np
from mmengine.evaluator import BaseMetric
from mmengine.registry import METRICS

from mmdtn.datasets.corruption import BENCHMARK

# Top-1 errors of AlexNet, averaged over the five severities, as published with ImageNet-C.
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
BySeverity = Mapping[str, Sequence[float]]  # one value per severity, by corruption


def mean_error(errors: BySeverity) -> float:
    """Computes the mean of the errors over all corruptions and severities."""
    return float(np.mean([np.mean(values) for values in errors.values()]))


def corruption_error(name: str, errors: Sequence[float]) -> float:
    """Computes the corruption error CE in percent: the mean error over five severities, divided by that of AlexNet."""
    if len(errors) != 5:
        raise ValueError(f'CE of {name} needs the errors of all five severities, but got {len(errors)} errors.')
    return 100 * float(np.mean(errors)) / ALEXNET[name]


def mean_corruption_error(errors: BySeverity) -> float:
    """Computes mCE, the mean of the corruption errors, in percent."""
    return float(np.mean([corruption_error(name, values) for name, values in errors.items()]))


def is_whole_benchmark(values: BySeverity) -> bool:
    """Tells whether the values cover the whole benchmark: its 15 corruptions at five severities each."""
    return set(values) == set(BENCHMARK) and all(len(v) == 5 for v in values.values())


def performance(clean: float, corrupted: BySeverity) -> dict[str, float]:
    """Computes the metrics of COCO-C from a metric for which higher is better.

    P is the performance on clean images, mPC is the mean performance under corruption, and rPC is ``100 * mPC / P``.
    """
    mean = float(np.mean([np.mean(values) for values in corrupted.values()]))
    return dict(P=clean, mPC=mean, rPC=100 * mean / clean if clean else float('nan'))


@cache
def imagenet_folders() -> list[str]:
    """Returns the names of ImageNet's 1000 class folders (wnids) in the order of a classifier's outputs."""
    return sorted(resources.files('timm').joinpath('data/_info/imagenet_synsets.txt').read_text().split())


@METRICS.register_module()
class SubsetAccuracy(BaseMetric):
    """Top-1 accuracy on a subset of a classifier's classes.

    ImageNet-R, for example, has 200 of the 1000 classes of ImageNet. For ``top1_of_N``, the prediction is the best of
    the N classes in the subset. For ``top1_of_all``, it is the best of all classes.

    Args:
        classes: Names of the classes in the subset, for data whose labels are indices of the classifier's outputs.
            Images of other classes are ignored. With None, the class folders of the data set are the subset, and labels
            are indices of these folders.
        outputs: Names of the classifier's outputs, in order. None means the 1000 classes of ImageNet.

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
                    f'The classifier has {len(scores)} outputs, but outputs has {len(outputs)} names'
                    f'{"" if self.outputs else ", the classes of ImageNet"}. Set outputs to the names of its classes.'
                )
            self.results.append((scores, int(sample['gt_label'])))

    def compute_metrics(self, results: list) -> dict[str, float]:
        outputs = list(self.outputs or imagenet_folders())
        place = {name: i for i, name in enumerate(outputs)}
        by_folder = self.classes is None
        assert self.dataset_meta is not None
        names = list(self.dataset_meta['classes'] if self.classes is None else self.classes)
        if unknown := [name for name in names if name not in place]:
            raise ValueError(
                f'The classifier has no output {unknown[0]!r}. Give classes, or class folders, that are named as in '
                'outputs.'
            )
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
