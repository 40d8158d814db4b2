"""Compares the metric with results that were counted by hand."""

import pytest
import torch
from mmpretrain.evaluation import Accuracy

from mmdtn.dvt import ExitAccuracy
from mmdtn.dvt.metric import confidences

from .small import drawn, images, samples


def evaluate(model, x, **options):
    metric = ExitAccuracy(**options)
    with torch.no_grad():
        predicted = model(x, samples(len(x)), mode='predict')
    metric.process(None, [sample.to_dict() for sample in predicted])
    return metric, metric.evaluate(len(x)), predicted


@pytest.fixture(scope='module')
def pictures():
    return images(number=40)


def test_accuracy_of_each_exit(pictures):
    model = drawn()
    metric, got, predicted = evaluate(model, pictures)
    truth = torch.arange(40) % 7
    with torch.no_grad():
        logits = model(pictures)
    for k, scores in enumerate(logits, 1):
        right = 100 * (scores.argmax(1) == truth).double().mean().item()
        assert got[f'exit{k}/top1'] == pytest.approx(right)
    assert len({got[f'exit{k}/top1'] for k in (1, 2, 3)}) > 1
    theirs = Accuracy(topk=(1, 5))
    theirs.process(None, [sample.to_dict() for sample in predicted])
    theirs = theirs.evaluate(40)
    assert got['accuracy/top1'] == pytest.approx(theirs['accuracy/top1'], abs=1e-4)
    assert got['accuracy/top5'] == pytest.approx(theirs['accuracy/top5'], abs=1e-4)
    loss = torch.nn.functional.cross_entropy(logits[-1], truth).item()
    assert got['accuracy/loss'] == pytest.approx(loss, rel=1e-4)
    metric.process(None, [sample.to_dict() for sample in predicted])
    conf, hit = confidences(metric.results)
    assert conf.shape == hit.shape == (3, 40) and hit.dtype == torch.bool
    torch.testing.assert_close(conf, torch.stack([scores.softmax(1).amax(1) for scores in logits]))
    assert sum(v.numel() for v in metric.results[0].values() if isinstance(v, torch.Tensor)) == 6, 'no score is kept'


def test_of_images_that_leave_early(pictures):
    model = drawn()
    with torch.no_grad():
        conf = [scores.softmax(1).amax(1) for scores in model(pictures)]
    model.thresholds = (conf[0].median().item() + 1e-4, conf[1].median().item() + 1e-4)
    _, got, predicted = evaluate(model, pictures, gflops=[1.0, 2.5, 6.0])
    taken = torch.tensor([sample.exit for sample in predicted])
    right = torch.cat([sample.pred_label for sample in predicted]) == torch.arange(40) % 7
    assert got['accuracy/top1'] == pytest.approx(100 * right.double().mean().item())
    counts = [(taken == k).sum().item() for k in (1, 2, 3)]
    assert [got[f'exit{k}/share'] for k in (1, 2, 3)] == pytest.approx([100 * n / 40 for n in counts])
    assert got['gflops'] == pytest.approx((counts[0] * 1.0 + counts[1] * 2.5 + counts[2] * 6.0) / 40)
    assert all(counts) and 'exit1/top1' not in got
