"""Compares the metric with torch's cross-entropy."""

import pytest
import torch
import torch.nn.functional as F
from mmengine.registry import METRICS

from mmdtn.evaluation import CrossEntropy


def measure(logits, labels):
    from mmpretrain.structures import DataSample

    metric = METRICS.build(dict(type='CrossEntropy'))
    pairs = list(zip(logits, labels, strict=True))
    for part in (pairs[:3], pairs[3:]):
        metric.process({}, [DataSample().set_pred_score(x.softmax(0)).set_gt_label(y).to_dict() for x, y in part])
    return metric.evaluate(len(pairs))


def test_is_torchs_mean_cross_entropy():
    logits, labels = torch.randn(7, 5) * 3, torch.randint(5, (7,))
    measured = measure(logits, labels)
    assert [*measured] == ['loss/cross_entropy']
    assert measured['loss/cross_entropy'] == pytest.approx(F.cross_entropy(logits, labels).item(), rel=1e-5)


def test_a_score_of_zero_is_finite():
    assert measure(torch.tensor([[0.0, 1e4]] * 4), torch.zeros(4, dtype=torch.long))['loss/cross_entropy'] < 100


def test_several_classes_a_picture_are_refused():
    sample = dict(pred_score=torch.tensor([0.5, 0.5]), gt_label=torch.tensor([0, 1]))
    with pytest.raises(ValueError, match=r'\[0, 1\]'):
        CrossEntropy().process({}, [sample])
