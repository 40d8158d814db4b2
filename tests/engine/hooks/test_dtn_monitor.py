import math

import pytest
import torch
from mmengine.model import BaseModel
from mmengine.visualization import Visualizer
from torch import nn

from mmdtn.analysis import lambdas, mean_distance
from mmdtn.engine.hooks import DTNMonitorHook
from mmdtn.norms import DTN, DTN2d
from tests.engine import toy


def dense_distance(layer, height, width):
    """Computes the distance from its definition, with P over all pairs of tokens."""
    s = layer.pool_size
    h, w = math.ceil(height / s), math.ceil(width / s)
    y, x = (c.flatten().double() for c in torch.meshgrid(torch.arange(h), torch.arange(w), indexing='ij'))
    dy, dx = y[None] - y[:, None], x[None] - x[:, None]
    a = torch.zeros(layer.num_heads, 3) if layer.position is None else layer.position.detach()
    a1, a2, a3 = a.double().T[..., None, None]
    P = (a1 * (dx**2 + dy**2) + a2 * dx + a3 * dy).softmax(-1)
    return s * (P * torch.hypot(dx, dy)).sum(-1).mean(-1)


@pytest.mark.parametrize('grid', [(7, 5), (1, 9), (13, 12)])
@pytest.mark.parametrize('options', [dict(), dict(pool_size=2), dict(position='uniform'), dict(pool_size=4)])
def test_mean_distance_is_that_of_all_pairs(grid, options):
    torch.manual_seed(0)
    layer = DTN(20, num_heads=5, **options)
    if layer.position is not None:
        layer.position.data += 0.3 * torch.randn(5, 3)
    found = mean_distance(layer, *grid)
    torch.testing.assert_close(found, dense_distance(layer, *grid).float(), rtol=1e-4, atol=1e-5)
    assert mean_distance(DTN(20, num_heads=5, position='identity'), *grid).tolist() == [0] * 5


def test_lambdas_learned_and_fixed():
    layer = DTN(8, num_heads=2, var_lambda=0.25)
    layer.mean_mix.data = torch.tensor([0.0, 2.0])
    mean, var = lambdas(layer)
    torch.testing.assert_close(mean, torch.tensor([0.5, 0.8807971]))
    assert var.tolist() == [0.25, 0.25]
    assert lambdas(DTN(8, num_heads=2, mean_lambda=1.0))[0].tolist() == [1, 1]


class Model(BaseModel):
    """Model with the same grid of 6 x 10 tokens in the three layouts that layers take."""

    def __init__(self):
        super().__init__()
        self.map = DTN(4, num_heads=2)
        self.image = DTN2d(4, num_heads=4, pool_size=2)
        self.flat = DTN(4)
        self.unused = nn.Linear(2, 2)

    def forward(self, inputs, mode='loss'):
        tokens = torch.stack(inputs)[:, None, None] * torch.arange(60.0).view(1, 6, 10, 1).sin()
        tokens = self.image(self.map(tokens).permute(0, 3, 1, 2)).flatten(2).transpose(1, 2)
        return dict(loss=self.flat(tokens, hw_shape=(6, 10)).square().mean())


def test_shows_every_layer_and_head_and_costs_nothing_in_between(tmp_path, monkeypatch):
    shown, hooked = {}, []

    class Look(toy.Watch):
        def before_train_iter(self, runner, batch_idx, data_batch=None):
            hooked.append(sum(len(module._forward_hooks) for module in runner.model.modules()))

        def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
            if runner.iter + 1 == 8:
                shown['model'] = {name: mean_distance(getattr(runner.model, name), 6, 10) for name in layers}
            assert not any(module._forward_hooks for module in runner.model.modules())

    layers = dict(map=2, image=4, flat=1)
    steps = {}
    monkeypatch.setattr(Visualizer, 'add_scalars', lambda self, s, step=0, **_: steps.setdefault(step, {}).update(s))
    monkeypatch.setattr(toy, 'Toy', Model)
    toy.train(tmp_path, hooks=[DTNMonitorHook(interval=4), Look()])
    by_step = {step: {k: v for k, v in s.items() if k.startswith('dtn/')} for step, s in steps.items()}
    assert [step for step, scalars in by_step.items() if scalars] == [4, 8, 12]
    assert [n > 0 for n in hooked] == [(i + 1) % 4 == 0 for i in range(15)]
    expected = {
        f'dtn/{name}/{kind}/{head}'
        for name, heads in layers.items()
        for kind in ('lambda_mean', 'lambda_var', 'distance')
        for head in range(heads)
    }
    assert by_step[8].keys() == expected
    for name, distances in shown['model'].items():
        for head, distance in enumerate(distances.tolist()):
            assert by_step[8][f'dtn/{name}/distance/{head}'] == pytest.approx(distance)
    assert by_step[4]['dtn/map/lambda_mean/0'] != 0.5, 'training moved it'
