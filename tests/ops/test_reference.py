"""The definition: its derivatives, torch.func, export, and every device and dtype. The dense form is in tests/norms."""

import pytest
import torch
from torch import nn

from mmdtn.ops import Settings, Tensors, dtn, reference

from .settings import in_float64, random_tensors

SETTINGS = [
    Settings(),
    Settings(pool_size=2),
    Settings(prenorm=False, unbiased=True),
    Settings(pool_size=3, prenorm=False, pool_second_moment=False),
    Settings(pool_size=2, identity=True),
]


@pytest.mark.slow
@pytest.mark.parametrize('s', SETTINGS)
def test_derivatives_of_first_and_second_order(s):
    tensors = in_float64(random_tensors((1, 3, 4, 6), 2)[0])
    for function in (reference.dtn, dtn):  # the operator too, for which the reference differentiates twice

        def flat(*tensors, function=function):
            return function(Tensors(*tensors), s)

        assert torch.autograd.gradcheck(flat, tensors)
        assert torch.autograd.gradgradcheck(flat, tensors)


def test_the_clamp_of_a_rounded_variance_lets_its_gradient_pass():
    """Two flat halves far apart: within each, rounding alone decides on which side of zero a variance is."""
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(1, 12, 16, 1, 8, generator=generator) / 100
    z[:, :, 8:] += 100
    z[:, :, :8] -= 100
    position, upstream = torch.tensor([[-1.0, 0.0, 0.0]]), torch.randn(1, 12, 16, 1, 8, generator=generator)

    def gradient(z):
        z = z.requires_grad_()
        _, V = reference.neighbourhood(z, position.to(z), Settings())
        inside = [*range(2), *range(14, 16)]  # of the halves, as far from their border as P reaches
        rounded = (V[:, :, inside] == 0).float().mean()
        return torch.autograd.grad((V * upstream.to(z))[:, :, inside].sum(), z)[0], rounded

    exact, _ = gradient(z.double())
    found, rounded = gradient(z.clone())
    assert rounded > 0.1, 'many variances were negative'
    assert (found - exact).norm() < 0.01 * exact.norm()


@pytest.mark.parametrize('s', SETTINGS[:2])
@pytest.mark.parametrize('function', [reference.dtn, dtn])
def test_transforms_of_torch_func(function, s):
    tensors, upstream = random_tensors((2, 5, 6, 8), 2)
    x, *parameters = in_float64(tensors)

    def loss(x):
        return (function(Tensors(x, *parameters), s) * upstream).sum()

    (expected,) = torch.autograd.grad(loss(x), x)
    torch.testing.assert_close(torch.func.grad(loss)(x), expected)
    several = torch.stack((x, 2 * x)).detach()
    mapped = torch.func.vmap(lambda x: function(Tensors(x, *parameters), s))(several)
    torch.testing.assert_close(mapped, torch.stack([function(Tensors(x, *parameters), s) for x in several]))


@pytest.mark.parametrize('s', [Settings(), Settings(pool_size=2)])
def test_exports_with_open_height_and_width(s):
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.parameters_of_dtn = nn.ParameterList(random_tensors((1, 1, 1, 8), 2)[0][1:])

        def forward(self, x):
            return dtn(Tensors(x, *self.parameters_of_dtn), s)

    layer = Layer()
    sizes = {1: 2 * torch.export.Dim('h', min=2, max=64), 2: 2 * torch.export.Dim('w', min=2, max=64)}
    program = torch.export.export(layer, (torch.randn(2, 8, 6, 8),), dynamic_shapes=(sizes,), strict=False)
    assert 'mmdtn' not in str(program.graph), 'nobody else knows the operators of this package'
    for height, width in ((4, 4), (20, 6), (6, 50)):
        x = torch.randn(2, height, width, 8)
        torch.testing.assert_close(program.module()(x), layer(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('dtype', [torch.half, torch.bfloat16])
def test_computes_in_the_dtype_of_the_parameters(dtype):
    (x, *parameters), _ = random_tensors((2, 5, 6, 8), 2)
    x = x.detach().to(dtype)
    exact = reference.dtn(Tensors(x.float(), *parameters), Settings())
    assert reference.dtn(Tensors(x, *parameters), Settings()).equal(exact)
    y = dtn(Tensors(*(t.to('meta') for t in (x, *parameters))), Settings())
    assert (y.dtype, y.shape, y.device.type) == (dtype, x.shape, 'meta')
