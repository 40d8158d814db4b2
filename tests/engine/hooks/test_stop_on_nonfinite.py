import numpy as np
import pytest
import torch
from mmengine.config import Config
from mmengine.model import BaseModel
from mmengine.structures import BaseDataElement
from torch import nn

from mmdtn.engine.hooks.stop_on_nonfinite import NonFiniteError, StopOnNonFiniteHook, first_nonfinite_layer
from tests.engine import toy


class Logarithm(nn.Module):
    """Returns NaN below zero. Draws random numbers first, as dropout would."""

    def forward(self, x):
        return (x * (torch.rand(()) + 0.5)).log()


class Model(BaseModel):
    def __init__(self, bad='log'):
        super().__init__()
        self.scale = nn.Linear(4, 4)
        self.inner = nn.Sequential(nn.Tanh(), Logarithm())
        self.head = nn.Linear(4, 1)
        self.bad = bad

    def forward(self, inputs, data_samples=None, mode='loss'):
        x = self.scale(torch.stack(inputs))
        x = self.inner(x.abs() + 0.1 if self.bad != 'log' else torch.stack(inputs) + 0 * x)
        loss = self.head(x).square().mean()
        return dict(loss=loss / 0 if self.bad == 'division' else loss)


class Images(toy.Noisy):
    def __getitem__(self, index):
        value = -1.0 if index == 7 else 1.0
        sample = BaseDataElement(metainfo=dict(img_path=f'images/{index}.jpg'))
        return dict(inputs=torch.full((4,), value), data_samples=sample)


def train(tmp_path, monkeypatch, model, **options):
    monkeypatch.setattr(toy, 'Noisy', Images)
    monkeypatch.setattr(toy, 'Toy', model)
    return toy.train(tmp_path, interval=1, hooks=[StopOnNonFiniteHook()], **options)


@pytest.mark.parametrize('accumulate', [1, 4])
def test_names_iteration_images_and_layer_and_keeps_the_weights(tmp_path, monkeypatch, accumulate):
    with pytest.raises(NonFiniteError) as raised:
        train(tmp_path, monkeypatch, Model, accumulate=accumulate)
    message = str(raised.value)
    assert 'the loss is nan' in message and 'inner.1 (Logarithm)' in message and 'images/7.jpg' in message
    iteration = int(message.partition('iteration ')[2].split()[0])
    saved = sorted(tmp_path.glob('iter_*.pth'))
    assert len(saved) == iteration - 1
    for path in saved:
        weights = torch.load(path, weights_only=False)['state_dict'].values()
        assert all(weight.isfinite().all() for weight in weights)


def test_the_weights_are_those_before_the_step(tmp_path, monkeypatch):
    steps = []

    class Remember(StopOnNonFiniteHook):
        def before_train_iter(self, runner, batch_idx, data_batch=None):
            super().before_train_iter(runner, batch_idx, data_batch)
            steps[:] = [runner, {name: value.clone() for name, value in runner.model.state_dict().items()}]

    monkeypatch.setattr(f'{__name__}.StopOnNonFiniteHook', Remember)
    with pytest.raises(NonFiniteError):
        train(tmp_path, monkeypatch, Model)
    runner, before = steps
    for name, value in runner.model.state_dict().items():
        assert torch.equal(value, before[name])


def test_the_flag_is_made_before_the_backward_part_and_read_after_it(tmp_path, monkeypatch):
    """The GPU computes the backward pass while the process waits for the flag, and no optimizer step comes before."""
    order = []

    def note(name, method):
        return lambda *args, **kwargs: (order.append(name), method(*args, **kwargs))[1]

    monkeypatch.setattr(torch.Tensor, 'isfinite', note('flag', torch.Tensor.isfinite))
    monkeypatch.setattr(torch.Tensor, 'backward', note('backward', torch.Tensor.backward))
    monkeypatch.setattr(torch.Tensor, 'item', note('read', torch.Tensor.item))
    monkeypatch.setattr(torch.optim.Adam, 'step', note('step', torch.optim.Adam.step))

    class Fine(Model):
        def __init__(self):
            super().__init__('nothing')

    class Order(toy.Watch):
        def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
            runner.train_loop.stop_training = True
            found.append(order[order.index('flag') : order.index('step') + 1])

    found = []
    monkeypatch.setattr(toy, 'Noisy', Images)
    monkeypatch.setattr(toy, 'Toy', Fine)
    toy.train(tmp_path, hooks=[StopOnNonFiniteHook(), Order()])
    assert found[0] == ['flag', 'backward', 'read', 'step']


def test_a_loss_that_breaks_after_the_last_layer(tmp_path, monkeypatch):
    class Divides(Model):
        def __init__(self):
            super().__init__('division')

    with pytest.raises(NonFiniteError, match=r'inf .*iteration 1 .* loss'):
        train(tmp_path, monkeypatch, Divides)


class Chance(nn.Module):
    def forward(self, x):
        return x if torch.rand(()) < 0.9 else x * float('nan')


def test_the_step_is_run_again_with_its_random_numbers(tmp_path, monkeypatch):
    class Lottery(Model):
        def __init__(self):
            super().__init__('chance')
            self.inner = Chance()

    with pytest.raises(NonFiniteError, match=r'inner \(Chance\)'):
        train(tmp_path, monkeypatch, Lottery, loop=dict(type='ResumableEpochLoop', max_epochs=40))


def test_ruined_weights_do_not_reach_a_checkpoint(tmp_path, monkeypatch):
    class Infinite(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad * float('nan')

    class Sudden(Model):
        def __init__(self):
            super().__init__('gradient')

        def forward(self, inputs, data_samples=None, mode='loss'):
            x = torch.stack(inputs).abs()
            return dict(loss=Infinite.apply(self.head(self.scale(x))).square().mean())

    with pytest.raises(NonFiniteError, match=r'iteration 1, .*(scale|head)'):
        train(tmp_path, monkeypatch, Sudden)
    assert not list(tmp_path.glob('*.pth'))


def test_weights_that_are_ruined_already_are_named(tmp_path):
    model = Model('none')
    with torch.no_grad():
        model.head.weight[0, 2] = np.inf
    runner = Config(dict())
    runner.model = model
    assert first_nonfinite_layer(runner, {}) == 'the weights, at head.weight'
