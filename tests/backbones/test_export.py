"""Exported backbones, at sizes that they were not exported at."""

import pytest
import torch

from mmdtn.backbones import PVTDTN, SwinDTN


@pytest.mark.slow
@pytest.mark.parametrize('backbone', [PVTDTN, SwinDTN])
def test_exports_with_open_height_and_width(backbone):
    model = backbone(dict(base='tiny', depths=(1, 1, 1, 2))).eval()
    height, width = (32 * torch.export.Dim(name, min=2, max=42) for name in ('height', 'width'))
    program = torch.export.export(model, (torch.randn(1, 3, 512, 640),), dynamic_shapes=({2: height, 3: width},))
    assert 'mmdtn' not in str(program.graph), 'nobody else knows the operators of this package'
    # torch writes down that a stage had more than one window when it was exported; the program holds without that too.
    for size, check_guards in (((256, 320), True), ((480, 288), True), ((64, 96), False)):
        x = torch.randn(1, 3, *size)
        with torch.no_grad():
            exported, expected = program.module(check_guards=check_guards)(x), model(x)
        for got, want in zip(exported, expected, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
