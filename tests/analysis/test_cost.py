import pytest
import torch
from mmengine.analysis import FlopAnalyzer
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from mmdtn.analysis import SavedBytes, flops_by_module, norm_flops
from mmdtn.models import read_config
from mmdtn.norms import DTN
from mmdtn.ops import reference
from tools.analysis_tools import get_flops


def test_counts_each_storage_once_and_no_parameter():
    x = torch.randn(16, 8, requires_grad=True)
    model = nn.Sequential(nn.Linear(8, 32, bias=False), nn.Sigmoid())
    with SavedBytes(model) as saved:
        y = model(x)
    assert saved.total == (16 * 8 + 16 * 32) * 4  # the linear layer keeps x but not its weight, the sigmoid its output
    with SavedBytes(model) as twice:
        z = y * y  # one storage, saved for both factors
    assert twice.total == 16 * 32 * 4 and z.shape == y.shape
    with SavedBytes(model) as nothing, torch.no_grad():
        model(x)
    assert nothing.total == 0


@pytest.mark.parametrize('pool_size', [1, 2, 4])
def test_flops_of_a_norm_are_those_that_torch_and_mmengine_count(pool_size):
    layer, x = DTN(64, 4, pool_size), torch.randn(1, 13, 20, 64)
    with FlopCounterMode(display=False) as products:
        reference.neighbourhood(reference.by_head(x, 4, layer.settings), layer.position, layer.settings)
    assert norm_flops(layer, 13, 20, 64) == products.get_total_flops() / 2 + 5 * x.numel()  # torch counts 2 for each
    assert norm_flops(layer, 13, 20, 64) == flops_by_module(layer, x)['']
    plain = FlopAnalyzer(nn.LayerNorm(64), (x,)).tracer_warnings('none').total()
    assert norm_flops(nn.LayerNorm(64), 13, 20, 64) == plain == flops_by_module(nn.LayerNorm(64), x)['']


def test_the_backbone_of_a_detector_may_be_a_converted_one(tmp_path):
    config = tmp_path / 'converted.py'
    config.write_text(
        "default_scope = 'mmdet'\n"
        "_pvt = dict(type='PyramidVisionTransformer', embed_dims=8, num_layers=[1] * 4, num_heads=[1, 2, 4, 8])\n"
        "model = dict(type='RetinaNet', backbone=dict(type='ConvertedBackbone', backbone=_pvt))\n"
    )
    backbone = get_flops.counted(read_config(config))
    assert sum(isinstance(m, DTN) for m in backbone.modules()) == 8
    assert get_flops.count(backbone, (64, 64))[0] > 0
