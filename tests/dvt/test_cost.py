"""Compares FLOPs with those in the paper, and with the paper's way of counting."""

import pytest
import torch

from mmdtn.analysis import exit_flops
from mmdtn.dvt import DVT

from .published import REUSES

# GFLOPs up to each exit, counted as in the paper. For T2T-ViT-12 they are also printed in Table 6.
GFLOPS = {
    't2t-12': dict(
        none=(0.4725, 1.3707, 3.1454),
        feature=(0.4725, 1.4251, 3.3077),
        relation=(0.4725, 1.4081, 3.3353),
        both=(0.4725, 1.4625, 3.4975),
    ),
    't2t-14': dict(
        none=(1.2065, 3.6112, 8.4115),
        feature=(1.2065, 3.7301, 8.7649),
        relation=(1.2065, 3.7220, 8.9742),
        both=(1.2065, 3.8409, 9.3276),
    ),
    'deit-s': dict(
        none=(1.1453, 3.4501, 8.0584),
        feature=(1.1453, 3.5743, 8.4273),
        relation=(1.1453, 3.5321, 8.4749),
        both=(1.1453, 3.6563, 8.8438),
    ),
}
PRINTED = dict(
    none=(0.47, 1.37, 3.15), feature=(0.47, 1.43, 3.31), relation=(0.47, 1.41, 3.34), both=(0.47, 1.46, 3.50)
)
CASES = [
    pytest.param(model, reuse, marks=() if (model, reuse) == ('t2t-12', 'both') else pytest.mark.exhaustive)
    for model in GFLOPS
    for reuse in REUSES
]


@pytest.mark.slow
@pytest.mark.parametrize(('name', 'reuse'), CASES)
def test_gflops_up_to_each_exit(name, reuse):
    features, relations = REUSES[reuse]
    model = DVT(name, reuse_features=features, reuse_relations=relations).eval()
    got = [n / 1e9 for n in exit_flops(model, torch.zeros(1, 3, 224, 224))]
    assert got == pytest.approx(GFLOPS[name][reuse], rel=1e-3)
    if name == 't2t-12':
        assert [round(g, 2) for g in got] == pytest.approx(PRINTED[reuse], abs=0.0101)
