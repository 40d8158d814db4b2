"""Products of all heads, whichever library makes them and whatever they leave out, against torch's in float64."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from mmdtn.norms import products as module
from mmdtn.norms.kernels import axis_kernel
from mmdtn.norms.products import kernel_gradient, multiply

ONEDNN = pytest.mark.skipif(not module._has_avx512_linear(), reason='oneDNN is asked on CPUs with AVX-512 only')
LIBRARIES = ['torch', pytest.param('oneDNN', marks=ONEDNN)]
POSITIONS = {
    'local': [[-1.0, -1.0, 1.0], [-1.0, 1.0, -1.0]],
    'far to one side': [[-1.0, 60.0, -60.0], [-0.5, -40.0, 0.0]],
    'near and wide': [[-1.0, 0.0, 0.0], [-0.0001, 0.0, 0.0]],
    'wide': [[0.0, 0.0, 0.0], [0.001, 0.1, 0.1]],
}


@pytest.fixture
def library(request, monkeypatch):
    monkeypatch.setattr(module, 'SMALL', 1)
    monkeypatch.setattr(module, '_of_intel', lambda: request.param == 'torch')
    if request.param == 'torch':
        monkeypatch.setattr(torch.ops.mkldnn, '_linear_pointwise', None)  # not called
    else:
        monkeypatch.setattr(torch, 'bmm', None)  # not called
        monkeypatch.setattr(torch, 'matmul', None)
    return request.param


def difference(a, b):
    return (a.double() - b.double()).abs().max().item()


@pytest.mark.parametrize('library', LIBRARIES, indirect=True)
@pytest.mark.parametrize('positions', POSITIONS)
@pytest.mark.parametrize('n, m', [(5, 12), (84, 100), (127, 10), (128, 10), (150, 3), (336, 21)])
def test_products_equal_torch(library, positions, n, m):
    torch.manual_seed(0)
    kernel = axis_kernel(torch.tensor(POSITIONS[positions]), n, 1)
    matrices, grad = torch.randn(3, 2, n, m), torch.randn(3, 2, n, m)
    for k in (kernel, kernel.mT):
        for b in (matrices, matrices.mT.contiguous().mT, torch.cat([matrices, matrices], -1)[..., m:]):
            assert difference(multiply(k, b, torch.full((3, 2, n, m), torch.nan)), k.double() @ b.double()) < 1e-5
            gradient = kernel_gradient(grad, b, k)
            assert difference(gradient * (k != 0), (grad.double() @ b.double().mT).sum(0) * (k != 0)) < 4e-5


@pytest.mark.parametrize('library', LIBRARIES, indirect=True)
@pytest.mark.parametrize('n', [6, 200])
def test_products_go_where_they_are_wanted(library, n):
    kernel, matrices = axis_kernel(torch.tensor(POSITIONS['local']), n, 1), torch.randn(3, 2, n, 12)
    expected = kernel.double() @ matrices.double()
    transposed = torch.full((3, 2, 3, n, 4), torch.nan).transpose(2, 3)
    assert multiply(kernel, matrices, transposed) is transposed
    assert difference(transposed, expected.view(3, 2, n, 3, 4)) < 1e-5
    inside = torch.full((3, 2, n + 1, 12), torch.nan)
    multiply(kernel, matrices, inside[:, :, :n])
    assert difference(inside[:, :, :n], expected) < 1e-5
    assert inside[:, :, n].isnan().all()


@pytest.mark.parametrize('n', [60, 200])
def test_float64_stays_float64(n):
    kernel = axis_kernel(torch.tensor(POSITIONS['local'], dtype=torch.float64), n, 1)
    matrices, grad = torch.randn(2, 3, 2, n, 9, dtype=torch.float64)
    assert difference(multiply(kernel, matrices, torch.empty_like(matrices)), kernel @ matrices) < 1e-14
    assert difference(kernel_gradient(grad, matrices, kernel) * kernel, (grad @ matrices.mT).sum(0) * kernel) < 1e-13


def test_zeros_of_a_kernel_are_not_multiplied():
    kernel = axis_kernel(torch.tensor(POSITIONS['near and wide']), 336, 1)
    parts = list(module._parts(kernel))
    cells = range(336)
    done = [sum(len(cells[r]) * len(cells[c]) for head, r, c in parts if head == i) for i in (0, 1)]
    assert done == [pytest.approx(336 * 64, rel=0.1), 336 * 336]  # 48 rows see 8 columns more on each side


def test_a_kernel_with_nan_gives_nan():
    kernel, matrices = torch.eye(200).repeat(2, 1, 1), torch.ones(1, 2, 200, 5)
    kernel[1, 3, 190] = torch.nan
    product = multiply(kernel, matrices, torch.empty(1, 2, 200, 5))
    assert product[0, 1, 3].isnan().all() and product[0, 0].eq(1).all()


def test_fake_tensors_have_no_values_to_look_at():
    with FakeTensorMode():
        kernel, matrices = torch.empty(2, 200, 200), torch.empty(3, 2, 200, 5)
        assert multiply(kernel, matrices, torch.empty(3, 2, 200, 5)).shape == (3, 2, 200, 5)
        assert kernel_gradient(matrices, matrices, kernel).shape == (2, 200, 200)
