"""Gradients are clipped relative to the weights, with any optimizer wrapper."""

import pytest
import torch
from mmengine.hooks import Hook

from mmdtn.engine.hooks import AdaptiveClipHook
from tests.engine.toy import train


class Steps(Hook):
    """Hook that records the gradients of each optimizer step, and the weights before it."""

    def __init__(self):
        self.steps = []

    def before_train(self, runner):
        runner.optim_wrapper.optimizer.register_step_pre_hook(self.note)

    def note(self, optimizer, *_):
        parameters = [p for group in optimizer.param_groups for p in group['params']]
        self.steps.append([(p.detach().clone(), p.grad.clone()) for p in parameters])


def ratio(weight, grad):
    """Returns the largest ratio of gradient norm to weight norm, over the rows of a matrix or for a whole vector."""
    rows = [t if t.dim() > 1 else t[None] for t in (weight, grad)]
    lengths, of_grad = (t.norm(dim=1) for t in rows)
    return (of_grad / lengths.clamp(min=1e-3)).max().item()


@pytest.mark.parametrize('accumulate', [1, 2])
def test_no_gradient_is_longer_than_a_share_of_its_weights(tmp_path, accumulate):
    plain, before, after = Steps(), Steps(), Steps()
    train(tmp_path / 'plain', hooks=[plain], accumulate=accumulate)
    train(tmp_path / 'clipped', hooks=[before, AdaptiveClipHook(clip_factor=0.05), after], accumulate=accumulate)
    assert len(plain.steps) == len(before.steps) == -(-15 // accumulate)
    assert all(g.equal(h) for (_, g), (_, h) in zip(plain.steps[0], before.steps[0], strict=True))
    shortened = 0
    for there, here in zip(before.steps, after.steps, strict=True):
        for (weight, whole), (_, grad) in zip(there, here, strict=True):
            assert ratio(weight, grad) <= 0.05 * 1.0001
            if ratio(weight, whole) > 0.05:
                shortened += 1
                assert not grad.equal(whole)
            else:
                assert grad.equal(whole), 'short ones stay as they are'
            cosine = torch.cosine_similarity(grad.reshape(len(grad), -1), whole.reshape(len(grad), -1))
            assert (cosine[whole.reshape(len(grad), -1).norm(dim=1) > 1e-6].abs() > 0.999).all(), 'only shorter'
    assert shortened > 5


def test_a_share_of_nothing_is_refused():
    with pytest.raises(ValueError, match=r'clip_factor=0.0: .*0\.01'):
        AdaptiveClipHook(clip_factor=0.0)
