"""Random layers for the tests of the operator: tensors and settings."""

import torch
from hypothesis import strategies as st

from mmdtn.ops import Settings, Tensors

NAMES = ('y', *Tensors._fields)


@st.composite
def settings(draw):
    return Settings(
        pool_size=draw(st.sampled_from([1, 1, 2, 3, 4])),
        prenorm=draw(st.booleans()),
        unbiased=draw(st.booleans()),
        pool_second_moment=draw(st.booleans()),
        identity=draw(st.sampled_from([False, False, False, True])),
    )


def random_tensors(shape, heads, seed=0):
    """What ``dtn`` takes in front of its settings, and an upstream gradient, all in float32."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    channels = shape[-1]
    tensors = (
        normal(*shape) * 2 + 0.5,
        1 + normal(channels) / 2,
        normal(channels) / 2,
        normal(heads).sigmoid(),
        normal(heads).sigmoid(),
        normal(heads, 3) / 2,
    )
    return [t.requires_grad_() for t in tensors], normal(*shape)


def results(function, tensors, upstream, s):
    """The output and all gradients, by name."""
    y = function(Tensors(*tensors), s)
    gradients = torch.autograd.grad(y, tensors, upstream.to(y.dtype), materialize_grads=True)
    return dict(zip(NAMES, (y.detach(), *gradients), strict=True))


def in_float64(tensors):
    return [t.detach().double().requires_grad_() for t in tensors]


def relative_error(found, exact):
    found, exact = found.detach().double(), exact.detach()
    return float((found - exact).norm() / exact.norm().clamp(min=1e-30))
