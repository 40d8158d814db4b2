import re

import pytest
import torch
from mmengine.analysis import FlopAnalyzer
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from mmdtn.analysis import SavedBytes, flops_by_module, norm_flops
from mmdtn.datasets import write_coco
from mmdtn.models import read_config
from mmdtn.norms import DTN
from mmdtn.ops import reference
from tests.training import write_detector
from tools.analysis_tools import get_flops


def test_counts_each_storage_once_and_no_parameter():
    x = torch.randn(16, 8, requires_grad=True)
    model = nn.Sequential(nn.Linear(8, 32, bias=False), nn.Sigmoid())
    with SavedBytes(model) as saved:
        y = model(x)
    assert saved.total == (16 * 8 + 16 * 32) * 4  # x of the linear layer and the output of the sigmoid
    with SavedBytes(model) as twice:
        z = y * y  # both factors are the same storage
    assert twice.total == 16 * 32 * 4 and z.shape == y.shape
    with SavedBytes(model) as nothing, torch.no_grad():
        model(x)
    assert nothing.total == 0


@pytest.mark.parametrize('pool_size', [1, 2, 4])
def test_flops_of_a_norm_are_those_that_torch_and_mmengine_count(pool_size):
    layer, x = DTN(64, 4, pool_size), torch.randn(1, 13, 20, 64)
    with FlopCounterMode(display=False) as products:
        reference.neighbourhood(reference.by_head(x, 4, layer.settings), layer.position, layer.settings)
    assert norm_flops(layer, 13, 20, 64) == products.get_total_flops() / 2 + 5 * x.numel()  # torch counts 2
    assert norm_flops(layer, 13, 20, 64) == flops_by_module(layer, x)['']
    plain = FlopAnalyzer(nn.LayerNorm(64), (x,)).tracer_warnings('none').total()
    assert norm_flops(nn.LayerNorm(64), 13, 20, 64) == plain == flops_by_module(nn.LayerNorm(64), x)['']


def test_a_detector_is_counted_whole_and_its_backbone_too(tmp_path, capsys, monkeypatch):
    config = tmp_path / 'converted.py'
    config.write_text(
        "_base_ = 'mmdet::pvt/retinanet_pvt-t_fpn_1x_coco.py'\n"
        "_pvt = dict(type='PyramidVisionTransformer', embed_dims=8, num_layers=[1] * 4, num_heads=[1, 2, 4, 8])\n"
        "custom_imports = dict(imports=['mmdtn'])\n"
        "model = dict(backbone=dict(_delete_=True, type='ConvertedBackbone', backbone=_pvt),\n"
        '             neck=dict(in_channels=[8, 16, 32, 64]))\n'
    )
    model = get_flops.counted(read_config(config))
    assert sum(isinstance(m, DTN) for m in model.backbone.modules()) == 8
    monkeypatch.setattr('sys.argv', ['get_flops.py', str(config), '--shape', '64', '96'])
    get_flops.main()
    rows = re.findall(r'^(.*): ([\d.]+) GFLOPs.*?, ([\d.]+)M parameters$', capsys.readouterr().out, re.M)
    image = torch.zeros(1, 3, 64, 96)
    for (name, flops, parameters), part in zip(rows, (model, model.backbone), strict=True):
        assert float(flops) == pytest.approx(flops_by_module(part, image)[''] / 1e9, abs=1e-3), name
        assert float(parameters) == pytest.approx(sum(p.numel() for p in part.parameters()) / 1e6, abs=1e-2), name
    assert [name for name, *_ in rows] == [str(config), '  the backbone']
    options = ['--shape', '64', '--cfg-options', 'model.bbox_head.num_classes=3']
    monkeypatch.setattr('sys.argv', ['get_flops.py', str(config), *options])
    get_flops.main()
    assert float(parameters_of(capsys.readouterr().out)[0]) < float(rows[0][2]), 'of a head for fewer classes'


def parameters_of(printed):
    return re.findall(r'64 x 64, ([\d.]+)M parameters', printed)


def test_a_size_that_is_too_small_for_a_model_is_told_in_a_line(tmp_path, monkeypatch):
    config = tmp_path / 'dino.py'
    config.write_text(
        "_base_ = 'mmdet::dino/dino-4scale_r50_8xb2-12e_coco.py'\n"
        'model = dict(backbone=dict(init_cfg=None), encoder=dict(num_layers=1), decoder=dict(num_layers=1))\n'
    )
    monkeypatch.setattr('sys.argv', ['get_flops.py', str(config), '--shape', '128'])
    with pytest.raises(SystemExit, match=r'128 x 128: .*larger --shape'):
        get_flops.main()


@pytest.mark.slow
def test_a_detector_whose_head_asks_for_the_size_of_the_image_is_counted(tmp_path):
    data = write_coco(tmp_path / 'coco', train=1, val=1, sides=(64, 80))
    model = get_flops.counted(read_config(write_detector(tmp_path / 'detector.py', data, masks=True)))
    parts = get_flops.count_parts(model, (64, 96))
    assert parts[''] > parts['backbone'] + parts['rpn_head'] > parts['backbone'] > 0
