"""Every normaliser in ONNX Runtime: what an exporter does not understand it may leave out without a word."""

import pytest
import torch
from torch import nn

from mmdtn.norms import DTN, DTN2d
from tests.exporting import in_onnx_runtime, largest_difference

from .test_normalisers import NORMS, C, make


class SideBySide(nn.Module):
    """One export of all norms takes a fraction of the time of as many exports."""

    def __init__(self, norms):
        super().__init__()
        self.norms = nn.ModuleList(norms)

    def forward(self, x):
        return tuple(
            norm(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1) if isinstance(norm, DTN2d) else norm(x)
            for norm in self.norms
        )


@pytest.fixture(scope='module')
def norms():
    torch.manual_seed(0)
    dtns = [
        DTN(C, num_heads=3, pool_size=4),
        DTN2d(C, num_heads=3, pool_size=3, prenorm=False, unbiased=True, pool_second_moment=False),
        DTN(C, num_heads=3, position='identity', mean_lambda=1.0, affine=False),
    ]
    with torch.no_grad():
        for p in (p for norm in dtns for p in norm.parameters()):
            p.add_(0.3 * torch.randn(p.shape))
    norms = SideBySide([*(make(name) for name in NORMS), *dtns])
    for _ in range(3):  # estimates of batches that are neither 0 nor 1
        norms(torch.randn(4, 6, 6, C) * 2 + 0.5)
    return norms.eval()


@pytest.mark.slow
@pytest.mark.parametrize('sides', ['fixed', 'open'])
def test_in_onnx_runtime(norms, sides):
    """9 x 13 and 7 x 10 tokens do not divide by the cells of 3 and 4: those at the edge hold fewer."""
    names = ('batch', 'height', 'width')
    shapes = dict(enumerate(torch.export.Dim(name, min=1, max=512) for name in names))
    x = torch.randn(2, 7, 10, C)
    program = torch.onnx.export(norms, (x,), dynamic_shapes=(shapes,) if sides == 'open' else None, verbose=False)
    run = in_onnx_runtime(program)
    assert largest_difference(run, norms, x) < 1e-5
    if sides == 'open':
        for size in ((1, 9, 13), (3, 4, 8), (2, 2, 5)):
            assert largest_difference(run, norms, torch.randn(*size, C) * 3 - 1) < 1e-5
