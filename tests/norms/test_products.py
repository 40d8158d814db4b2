"""Products of all heads, whichever library makes them, against torch's in float64."""

import pytest
import torch

from mmdtn.norms import products as module
from mmdtn.norms.products import products

ONEDNN = pytest.mark.skipif(not module._has_avx512_linear(), reason='oneDNN is asked on CPUs with AVX-512 only')
LIBRARIES = ['torch', pytest.param('oneDNN', marks=ONEDNN)]


@pytest.mark.parametrize('library', LIBRARIES)
@pytest.mark.parametrize('n, m, q', [(5, 7, 12), (84, 84, 100), (50, 300, 50)])
def test_products_equal_torch(monkeypatch, library, n, m, q):
    monkeypatch.setattr(module, 'SMALL', 1 if library == 'oneDNN' else 10**6)
    if library == 'oneDNN':
        monkeypatch.setattr(torch, 'bmm', None)  # not called
    torch.manual_seed(0)
    a, b = torch.randn(3, n, m), torch.randn(3, m, q)
    expected = (a.double() @ b.double()).float()
    for p in (a, a.mT.contiguous().mT):
        for r in (b, b.mT.contiguous().mT, torch.cat([b, b], 2)[..., q:]):
            torch.testing.assert_close(products(p, r), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize('library', LIBRARIES)
def test_products_go_where_they_are_wanted(monkeypatch, library):
    monkeypatch.setattr(module, 'SMALL', 1 if library == 'oneDNN' else 10**6)
    a, b = torch.randn(2, 6, 5), torch.randn(2, 5, 12)
    transposed = torch.full((2, 3, 6, 4), torch.nan).transpose(1, 2)
    assert products(a, b, transposed) is transposed
    torch.testing.assert_close(transposed, torch.matmul(a, b).view(2, 6, 3, 4))
    inside = torch.full((2, 7, 12), torch.nan)
    products(a, b, inside[:, :6])
    torch.testing.assert_close(inside[:, :6], torch.matmul(a, b))
    assert inside[:, 6].isnan().all()


def test_float64_stays_float64():
    a, b = torch.randn(2, 60, 60, dtype=torch.float64), torch.randn(2, 60, 9, dtype=torch.float64)
    assert torch.equal(products(a, b), torch.bmm(a, b))
