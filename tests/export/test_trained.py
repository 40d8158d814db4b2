"""Exported detectors that were trained on generated images have the same boxes and the same AP as the original."""

from pathlib import Path

import pytest

from mmdtn.datasets import write_coco
from mmdtn.export import export
from tests.training import REPO, run_tool

from .agreement import agreement

HERE = Path(__file__).parent


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    'base, norm',
    [
        (HERE / 'retinanet_pvt_shapes.py', 'DTN'),
        (HERE / 'retinanet_pvt_shapes.py', 'LN'),
        (HERE / 'retinanet_swin_shapes.py', 'DTN'),
        (HERE / 'retinanet_swin_shapes.py', 'LN'),
        (REPO / 'configs' / 'studies' / 'mask-rcnn_pvt_shapes.py', 'DTN'),
    ],
    ids=lambda v: v if isinstance(v, str) else v.stem,
)
def test_agrees_with_the_original(tmp_path, base, norm):
    data = write_coco(tmp_path / 'shapes')
    config = tmp_path / 'config.py'
    config.write_text(
        f"_base_ = '{base}'\n"
        f"model = dict(backbone=dict(norm_cfg=dict(type='{norm}')), data_preprocessor=dict(pad_size_divisor=32))\n"
        f"train_dataloader = dict(dataset=dict(data_root='{data}'))\n"
        'val_dataloader = val_evaluator = val_cfg = None\n'
    )
    run_tool('train.py', config, '--work-dir', tmp_path / 'run', cwd=tmp_path)
    checkpoint = (tmp_path / 'run' / 'last_checkpoint').read_text()
    export(str(config), checkpoint, tmp_path / 'model.onnx')
    found = agreement(str(config), checkpoint, tmp_path / 'model.onnx', data, tmp_path / 'tested')
    assert found.boxes > 400 and found.unmatched == 0
    assert found.pixels < 0.1 and found.scores < 1e-4
    assert found.ap.keys() == ({'bbox', 'segm'} if 'mask' in base.stem else {'bbox'})
    for kind, ap in found.ap.items():
        assert ap > 0.05 and abs(ap - found.exported_ap[kind]) < 1e-3
