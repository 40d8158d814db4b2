"""Compares the metrics of robustness with values computed by hand and with published ones."""

import numpy as np
import pytest
import torch
from mmengine.evaluator import Evaluator
from mmengine.structures import BaseDataElement

from mmdtn.datasets.corruption import BENCHMARK
from mmdtn.evaluation import (
    ALEXNET,
    SubsetAccuracy,
    corruption_error,
    imagenet_folders,
    is_whole_benchmark,
    mean_corruption_error,
    mean_error,
    performance,
)

BY_HAND = dict(gaussian_noise=[0.2, 0.3, 0.4, 0.5, 0.6], brightness=[0.1, 0.1, 0.2, 0.2, 0.4])
# Table 6 of the paper: rounded errors under the 15 corruptions, and their mean as stated in the paper.
PAPER = {
    'ViT-S LN': ([40, 42, 42, 50, 60, 46, 57, 43, 38, 39, 25, 36, 44, 42, 38], 42.80, 54.67),
    'ViT-S DTN': ([39, 40, 40, 49, 58, 44, 54, 40, 36, 34, 24, 32, 43, 39, 35], 40.47, 51.70),
    'ViT-S* LN': ([40, 42, 42, 51, 59, 45, 56, 42, 37, 36, 25, 34, 44, 39, 36], 41.87, 53.45),
    'ViT-S* DTN': ([36, 37, 37, 45, 55, 41, 54, 36, 35, 31, 23, 30, 41, 34, 33], 37.87, 48.41),
}


def test_two_corruptions_by_hand():
    assert corruption_error('gaussian_noise', BY_HAND['gaussian_noise']) == pytest.approx(45.12, abs=0.005)
    assert corruption_error('brightness', BY_HAND['brightness']) == pytest.approx(35.42, abs=0.005)
    assert mean_corruption_error(BY_HAND) == pytest.approx(40.27, abs=0.005)
    assert mean_error(BY_HAND) == pytest.approx(0.30)
    assert not is_whole_benchmark(BY_HAND)


def test_alexnet_is_the_unit():
    assert mean_corruption_error({name: [ALEXNET[name]] * 5 for name in BENCHMARK}) == pytest.approx(100, abs=1e-9)


@pytest.mark.parametrize('row', PAPER)
def test_the_papers_table_is_a_plain_mean(row):
    columns, mean, normalised = PAPER[row]
    errors = {name: [value / 100] * 5 for name, value in zip(BENCHMARK, columns, strict=True)}
    assert is_whole_benchmark(errors)
    assert 100 * mean_error(errors) == pytest.approx(mean, abs=0.005)
    assert mean_corruption_error(errors) == pytest.approx(normalised, abs=0.006)


def test_ce_is_of_all_severities():
    with pytest.raises(ValueError, match=r'fog.* 3 '):
        corruption_error('fog', [0.1, 0.2, 0.3])


def test_what_is_left_of_a_detectors_precision():
    numbers = performance(0.4, dict(fog=[0.3, 0.1], snow=[0.2, 0.2]))
    assert numbers == pytest.approx(dict(P=0.4, mPC=0.2, rPC=50.0))


def measure(metric, scores, labels, classes=()):
    evaluator = Evaluator(metric)
    evaluator.dataset_meta = dict(classes=list(classes))
    samples = []
    for row, label in zip(scores, labels, strict=True):
        samples.append(BaseDataElement(pred_score=torch.tensor(row), gt_label=torch.tensor([label])))
    evaluator.process(samples)
    return evaluator.evaluate(len(samples))


def test_subset_accuracy_of_folders():
    """A data set has three of five classes. The second image is classified correctly only among these three."""
    scores = [[0.1, 0.5, 0.0, 0.3, 0.1], [0.9, 0.0, 0.0, 0.4, 0.3], [0.1, 0.2, 0.3, 0.4, 0.0]]
    metric = SubsetAccuracy(outputs=['a', 'b', 'c', 'd', 'e'])
    found = measure(metric, scores, [0, 1, 2], classes=['b', 'd', 'e'])
    assert found == pytest.approx({'subset/top1_of_3': 200 / 3, 'subset/top1_of_all': 100 / 3})


def test_subset_accuracy_on_data_of_all_classes_leaves_the_others_out():
    scores = [[0.1, 0.5, 0.4], [0.9, 0.0, 0.1], [0.8, 0.1, 0.2]]
    found = measure(SubsetAccuracy(['a', 'c'], outputs=['a', 'b', 'c']), scores, [2, 1, 0])
    assert found == pytest.approx({'subset/top1_of_2': 100.0, 'subset/top1_of_all': 50.0})


def test_imagenets_folders_are_timms():
    """timm lists the 200 folders of ImageNet-R in one file and their indices among the 1000 in another."""
    from importlib import resources

    info = resources.files('timm').joinpath('data/_info')
    folders = imagenet_folders()
    assert len(folders) == 1000 and folders[0] == 'n01440764'
    places = [folders.index(wnid) for wnid in info.joinpath('imagenet_r_synsets.txt').read_text().split()]
    assert places == [int(line) for line in info.joinpath('imagenet_r_indices.txt').read_text().split()]


def test_imagenet_r_takes_200_of_1000_columns():
    from importlib import resources

    folders = resources.files('timm').joinpath('data/_info/imagenet_r_synsets.txt').read_text().split()
    column = imagenet_folders().index(folders[7])
    other = next(i for i, wnid in enumerate(imagenet_folders()) if wnid not in folders)
    scores = np.zeros((1, 1000), np.float32)
    scores[0, column], scores[0, other] = 0.4, 0.6
    found = measure(SubsetAccuracy(), scores.tolist(), [7], classes=folders)
    assert found == {'subset/top1_of_200': 100.0, 'subset/top1_of_all': 0.0}


def test_outputs_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r'2 outputs.* 1000'):
        measure(SubsetAccuracy(), [[0.1, 0.9]], [0], classes=['n01440764'])
    with pytest.raises(ValueError, match="'x'"):
        measure(SubsetAccuracy(outputs=['a', 'b']), [[0.1, 0.9]], [0], classes=['x'])
