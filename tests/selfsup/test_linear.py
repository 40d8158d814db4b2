"""Tests the linear evaluation: trained parameters, learning rates and the selection of the best rate."""

import pytest
import torch
from mmengine.registry import MODELS
from mmengine.structures import BaseDataElement
from torch import nn

from mmdtn.models import read_config
from mmdtn.selfsup import ProbeAccuracy
from tests.training import REPO

from .small import BACKBONE

CONFIG = REPO / 'configs/dino/linear_vit-s-star_8xb128-100e_in1k.py'
RATES = (0.1, 1.0, 10.0)


def probe(**options):
    return MODELS.build(dict(type='LinearProbe', backbone=BACKBONE, num_classes=7, rates=RATES) | options)


def samples(*labels):
    return [BaseDataElement(gt_label=torch.tensor([label])) for label in labels]


def test_each_rate_trains_its_own_classifier_on_frozen_features():
    model = probe(backbone=dict(BACKBONE, norm_cfg=dict(type='LN'), drop_path_rate=0.5)).train()
    x = torch.randn(4, 3, 16, 16)
    losses = model(x, samples(0, 1, 2, 6), mode='loss')
    assert list(losses) == ['loss_0.1', 'loss_1', 'loss_10']
    logits = model(x)
    labels = torch.tensor([0, 1, 2, 6])
    for loss, each in zip(losses.values(), logits, strict=True):
        torch.testing.assert_close(loss, nn.functional.cross_entropy(each, labels))
    assert torch.equal(model(x)[0], logits[0]), 'the backbone is in evaluation mode'
    losses['loss_1'].backward()
    reached = {name for name, p in model.named_parameters() if p.grad is not None}
    assert reached == {'head.probes.1.weight', 'head.probes.1.bias'}


@pytest.mark.parametrize(('features', 'backbone', 'channels'), [
    ('cls+mean', BACKBONE, 32), ('last4', dict(BACKBONE, arch=dict(BACKBONE['arch'], depth=6)), 64),
])  # fmt: skip
def test_features_by_one_argument(features, backbone, channels):
    model = probe(backbone=backbone, features=features).eval()
    assert model.head.probes[0].in_features == channels
    x = torch.randn(2, 3, 16, 16)
    tokens = model.backbone(x)
    assert len(tokens) == (4 if features == 'last4' else 1)
    torch.testing.assert_close(model(x)[2], model.head.probes[2](torch.cat(tokens, 1)))


def test_four_class_tokens_need_four_blocks_behind_those_with_dtn():
    with pytest.raises(ValueError, match='before block'):
        probe(backbone=dict(BACKBONE, arch=dict(BACKBONE['arch'], depth=4)), features='last4')
    with pytest.raises(ValueError, match='last4'):
        probe(features='last 4')


def test_the_best_rate_is_named():
    model = probe().eval()
    with torch.no_grad():  # classifier i says class i to everything, and the next classes come after
        for i, linear in enumerate(model.head.probes):
            linear.weight.zero_()
            linear.bias.copy_(-((torch.arange(7) - i) % 7).float())
    metric = ProbeAccuracy(RATES)
    found = model(torch.randn(5, 3, 16, 16), samples(1, 1, 1, 0, 6), mode='predict')
    metric.process(None, [sample.to_dict() for sample in found])
    values = metric.evaluate(5)
    assert values == pytest.approx({
        'accuracy/top1': 60.0, 'accuracy/top5': 60.0, 'best_rate': 1.0,
        'accuracy/top1_0.1': 20.0, 'accuracy/top1_1': 60.0, 'accuracy/top1_10': 0.0,
    })  # fmt: skip


def test_the_rates_of_a_config_reach_their_classifiers():
    from mmengine.optim import build_optim_wrapper

    cfg = read_config(CONFIG)
    cfg.model.backbone.init_cfg = None
    model = MODELS.build(dict(cfg.model, data_preprocessor=cfg.data_preprocessor))
    assert model.head.probes[0].in_features == 864 and model.head.num_classes == 1000
    wrapper = build_optim_wrapper(model, cfg.optim_wrapper)
    rate_of = {id(p): group['lr'] for group in wrapper.optimizer.param_groups for p in group['params']}
    parameters = [list(linear.parameters()) for linear in model.head.probes]
    for rate, of_probe in zip(cfg.model.rates, parameters, strict=True):
        assert [rate_of[id(p)] for p in of_probe] == pytest.approx([4 * rate] * 2)  # 1024 images
    assert len(rate_of) == 2 * len(parameters) and 1e-3 in cfg.model.rates
    assert cfg.val_evaluator.rates == cfg.model.rates
