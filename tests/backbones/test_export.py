"""Runs exported backbones in ONNX Runtime, at other image sizes than those of the export."""

import pytest
import torch

from mmdtn.backbones import PVTDTN, SwinDTN
from tests.exporting import in_onnx_runtime, largest_difference

from .helpers import randomised
from .test_all import CASES, small

# Each architecture has one block of each kind, because the time of an export grows with the number of blocks.
SWIN = dict(base='tiny', width=8, depths=(0, 0, 0, 2), num_heads=(1, 1, 2, 2))
PVT = dict(base='tiny', depths=(1, 1, 1, 1), widths=(8, 16, 20, 32), mlp_ratios=(1, 1, 1, 1))


def check(model, example, sizes, **limits):
    """Exports a model with an example of shape ``example``. Batch, height and width, or only the batch, are dynamic."""
    shapes = {0: torch.export.Dim('batch', min=1, max=64)}
    if sizes != [example]:
        shapes |= {i: 32 * torch.export.Dim(name, **limits) for i, name in ((2, 'height'), (3, 'width'))}
    x = torch.randn(2, 3, *example)
    with torch.no_grad():  # with gradients, torch uses another attention kernel
        program = torch.onnx.export(model, (x,), dynamic_shapes=(shapes,), verbose=False)
    assert 'mmdtn' not in str(program.exported_program.graph), 'nobody else knows the operators of this package'
    run, other = in_onnx_runtime(program), program.exported_program.module(check_guards=False)
    for batch, size in enumerate(sizes, 1):
        x = torch.randn(batch, 3, *size)
        assert largest_difference(run, model, x) < 2e-5
        assert largest_difference(other, model, x) < 2e-5


@pytest.mark.slow
def test_pvt():
    model = randomised(PVTDTN(PVT, out_type='cls_token'))
    check(model, (256, 320), [(64, 96), (96, 32), (224, 160)], min=1, max=42)


@pytest.mark.slow
def test_swin():
    """With images of at most 224 pixels, the last stage has a single window, which classifiers do not shift."""
    model = randomised(SwinDTN(SWIN, out_type='avg_featmap'))
    check(model, (256, 320), [(64, 96), (224, 256), (224, 224), (480, 256)], min=1, max=42)


# Exporters can drop a constant of the performer, so this test is part of every CI run.
@pytest.mark.parametrize(
    'name', [pytest.param(n, marks=pytest.mark.slow if n == 't2t-performer' else pytest.mark.exhaustive) for n in CASES]
)
def test_all(name):
    example, sizes = (256, 320), [(160, 96), (64, 256)]
    if name.startswith('levit'):
        example, sizes = (64, 96), [(64, 96)]
    check(randomised(small(name)), example, sizes, min=2, max=42)
