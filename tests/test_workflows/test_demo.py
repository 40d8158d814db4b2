"""What `make demo` runs, with a few pictures and one epoch."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

REPO = Path(__file__).parents[2]


def run(directory, *options):
    command = [sys.executable, REPO / 'tools' / 'demo.py', '--train', '8', '--val', '3', *options]
    return subprocess.run(command, capture_output=True, text=True, cwd=directory)


@pytest.mark.slow
def test_the_demo_ends_with_a_summary_pictures_and_a_checkpoint(tmp_path):
    done = run(tmp_path, '--epochs', '1')
    assert done.returncode == 0, done.stderr[-3000:]
    said = done.stdout
    metrics = json.loads((tmp_path / 'work_dirs' / 'demo' / 'summary.json').read_text())
    for name, kind in (('box AP', 'bbox'), ('mask AP', 'segm')):
        (line,) = (line for line in said.splitlines() if line.strip().startswith(name))
        ap, ap50 = metrics[f'coco/{kind}_mAP'], metrics[f'coco/{kind}_mAP_50']
        assert line.split()[2:] == [f'{ap:.3f}', 'AP50', f'{ap50:.3f}']
    pictures = sorted((tmp_path / 'work_dirs' / 'demo' / 'pictures').iterdir())
    assert [p.name for p in pictures] == ['000001.png', '000002.png', '000003.png']
    for picture in pictures:
        with Image.open(picture) as both, Image.open(tmp_path / 'data/shapes/val' / f'{picture.stem}.jpg') as one:
            assert both.size == (2 * one.width, one.height), 'truth and prediction, side by side'
    report = tmp_path / said.partition('  report ')[2].split()[0]
    assert '<img' in report.read_text()
    checkpoint = Path(said.partition('checkpoint')[2].split()[0])
    assert 'state_dict' in torch.load(tmp_path / checkpoint, weights_only=False)
    assert 'tools/train.py configs/pvt/' in said and (REPO / 'configs/pvt/mask-rcnn_pvt-t-dtn_fpn_1x_coco.py').exists()
    assert len(said.splitlines()) < 40, 'a person reads it'
    assert 'Epoch(train)' in (tmp_path / 'work_dirs' / 'demo' / 'log.txt').read_text()
