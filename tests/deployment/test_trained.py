"""Detectors that were trained on the generated pictures, exported: the same boxes and the same AP."""

from pathlib import Path

import pytest

from mmdtn.datasets import write_coco
from mmdtn.deployment import export
from tests.training import run_tool

from .agreement import agreement

HERE = Path(__file__).parent


@pytest.mark.exhaustive
@pytest.mark.parametrize('norm', ['DTN', 'LN'])
@pytest.mark.parametrize('backbone', ['pvt', 'swin'])
def test_agrees_with_the_original(tmp_path, backbone, norm):
    data = write_coco(tmp_path / 'shapes')
    config = tmp_path / 'config.py'
    config.write_text(
        f"_base_ = '{HERE}/retinanet_{backbone}_shapes.py'\n"
        f"model = dict(backbone=dict(norm_cfg=dict(type='{norm}')))\n"
        f"train_dataloader = dict(dataset=dict(data_root='{data}'))\n"
    )
    run_tool('train.py', config, '--work-dir', tmp_path / 'run', cwd=tmp_path)
    checkpoint = (tmp_path / 'run' / 'last_checkpoint').read_text()
    export(str(config), checkpoint, tmp_path / 'model.onnx')
    found = agreement(str(config), checkpoint, tmp_path / 'model.onnx', data, tmp_path / 'tested')
    assert found.boxes > 400 and found.unmatched == 0
    assert found.pixels < 0.1 and found.scores < 1e-4
    assert found.ap > 0.05 and abs(found.ap - found.exported_ap) < 1e-3
