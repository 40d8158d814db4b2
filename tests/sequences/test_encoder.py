"""Tests the parameters of the sequence classifier, the effect of padding, and the learning-rate schedule."""

import copy
from random import Random

import numpy as np
import pytest
import torch
from mmengine.optim import OptimWrapper
from mmengine.registry import MODELS, PARAM_SCHEDULERS
from torch import nn

from mmdtn.norms import DTN, LayerNorm
from mmdtn.norms.dtn import line_start
from mmdtn.sequences import SequenceClassifier, SequencePreprocessor
from mmdtn.sequences.encoder import sinusoids
from mmdtn.sequences.listops import UNKNOWN, Limits, draw_distinct, encode, evaluate

SMALL = dict(type='SequenceClassifier', max_length=64, width=24, depth=2, num_heads=4, mlp=32)
KINDS = dict(
    transformer=dict(type='FullAttention'),
    bigbird=dict(type='BigBirdAttention', block_size=4),
    reformer=dict(type='ReformerAttention'),
)
NORMS = ('LN', 'BN', 'IN', 'GN', 'ScaleNorm', 'DTN')


def build(kind='transformer', norm='LN', **changes):
    torch.manual_seed(0)
    return MODELS.build(dict(SMALL, attention=KINDS[kind], norm_cfg=dict(type=norm)) | changes)


def batch(number=5):
    drawn = draw_distinct(Random(0), Limits(5, 5, 20, 64))
    words = [next(drawn) for _ in range(number)]
    return dict(tokens=[encode(w) for w in words], gt_label=[evaluate(w) for w in words])


@pytest.mark.parametrize(
    ('attention', 'parameters'),
    [('FullAttention', 8_948_746), ('BigBirdAttention', 8_948_746), ('ReformerAttention', 6_851_594)],
)
def test_parameters_of_long_range_arena(attention, parameters):
    with torch.device('meta'):
        model = SequenceClassifier(dict(type=attention), dict(type='LN'))
    assert sum(p.numel() for p in model.parameters()) == parameters


def test_what_is_built():
    model = build(norm='DTN')
    norms = {name: m for name, m in model.named_modules() if isinstance(m, DTN)}
    assert {*norms} == {f'layers.{i}.norm{n}' for i in range(2) for n in (1, 2)}
    assert all(torch.equal(m.position, torch.tensor(line_start(4))) and m.eps == 1e-6 for m in norms.values())
    assert isinstance(model.norm, LayerNorm) and model.norm.eps == 1e-6
    assert not model.class_token.any() and 0.9 < model.embedding.weight.std() < 1.1
    assert all(m.bias is None for name, m in model.named_modules() if '.attention.' in name)
    drops = [m.p for m in model.modules() if isinstance(m, nn.Dropout)]
    assert drops == [0.1] * 7 and model.layers[0].attention.dropout == 0.1
    assert build('bigbird').layers[0].attention.dropout == 0
    seen = [layer.attention.seen for layer in build('bigbird').layers]
    assert not torch.equal(*seen), 'the index of the layer is the seed'


def test_positions():
    table = sinusoids(7, 6).numpy()
    for place in range(7):
        for pair in range(3):
            angle = place / 10_000 ** (2 * pair / 6)
            assert table[place, 2 * pair : 2 * pair + 2] == pytest.approx([np.sin(angle), np.cos(angle)], abs=1e-6)


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('norm', NORMS)
def test_neither_number_nor_content_of_the_padding_matters(kind, norm):
    model = build(kind, norm, dropout=0.0).double().train()
    for module in model.modules():
        if hasattr(module, 'dropout') and isinstance(module.dropout, float):
            module.dropout = 0.0
    data = model.data_preprocessor(batch(), training=True)
    longest = max(data['lengths'])
    assert longest < 64 == data['tokens'].shape[1]
    other = dict(data, tokens=data['tokens'][:, :longest].clone())
    other['tokens'][torch.arange(longest) >= torch.tensor(data['lengths'])[:, None]] = 7
    again = copy.deepcopy(model)
    losses = [m(**d, mode='loss')['loss'] for m, d in ((model, data), (again, other))]
    torch.testing.assert_close(*losses)
    for loss in losses:
        loss.backward()
    for (name, p), q in zip(model.named_parameters(), again.parameters(), strict=True):
        assert p.grad is not None, name
        torch.testing.assert_close(p.grad, q.grad)
    for p, q in zip(model.buffers(), again.buffers(), strict=True):
        torch.testing.assert_close(p, q)


@pytest.mark.parametrize(('norm', 'sees'), [('LN', False), ('BN', True), ('IN', True), ('DTN', True)])
def test_without_the_mask_statistics_see_the_padding(norm, sees):
    data = build().data_preprocessor(batch())
    scores = []
    for masked in (True, False):
        model = build(norm=norm, masked=masked).train()
        scores.append(model.eval()(**data) if norm == 'LN' else _without_dropout(model)(**data))
    assert torch.allclose(*scores, atol=1e-5) != sees


def _without_dropout(model):
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, 'dropout', None), float):
            module.dropout = 0.0
    return model


def test_the_last_real_token_counts():
    model = build().eval()
    data = model.data_preprocessor(batch())
    other = data['tokens'].clone()
    for row, length in enumerate(data['lengths']):
        other[row, length - 1] = UNKNOWN
    assert (model(**data) != model(**dict(data, tokens=other))).any(-1).all()


def test_results():
    model = build().eval()
    data = batch()
    results = model.test_step(data)
    scores = model(**model.data_preprocessor(data)).softmax(-1)
    for result, share, label in zip(results, scores, data['gt_label'], strict=True):
        torch.testing.assert_close(result.pred_score, share)
        assert result.pred_label.item() == share.argmax() and result.gt_label.tolist() == [label]
    (alone,) = model.test_step(dict(tokens=data['tokens'][2:3]))
    torch.testing.assert_close(alone.pred_score, results[2].pred_score, atol=1e-5, rtol=0)
    assert 'gt_label' not in alone


def test_sequences_that_are_too_long():
    with pytest.raises(ValueError, match=r'65 tokens.*max_length=64'):
        SequencePreprocessor(64)(dict(tokens=[[1] * 65]))
    with pytest.raises(ValueError, match=r'65 tokens.*max_length=64'):
        build()(torch.ones(1, 65, dtype=torch.long), [65])


@pytest.mark.parametrize('kind', ['DTN2d', 'Identity'])
def test_norms_that_cannot_take_lengths_are_refused(kind):
    with pytest.raises(ValueError, match=f'{kind} cannot normalise padded sequences'):
        build(norm=kind)


@pytest.mark.parametrize('steps', [1, 500, 1000, 5000])
def test_the_learning_rate(steps):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.05)
    wrapper = OptimWrapper(optimizer)
    schedule = PARAM_SCHEDULERS.build(dict(type='WarmupInverseSqrtLR', warmup=1000, by_epoch=False, optimizer=wrapper))
    assert optimizer.param_groups[0]['lr'] == 0
    for _ in range(steps):
        wrapper.step()
        schedule.step()
    want = {1: 0.05 / 1000**1.5, 500: 7.906e-4, 1000: 1.5811e-3, 5000: 7.0711e-4}
    assert optimizer.param_groups[0]['lr'] == pytest.approx(want[steps], rel=1e-3)
