"""Runs `make demo` with a few images and one epoch."""

import json
import re
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
            assert both.size == (6 * one.width, 3 * one.height), 'truth and prediction, enlarged, side by side'
    for moment in ('after one epoch', 'now'):
        picture = tmp_path / said.partition(f'predictions {moment}: ')[2].split()[0]
        with Image.open(picture) as both:
            assert both.width > 1.5 * both.height
    report = tmp_path / said.partition('  report ')[2].split()[0]
    assert '<img' in report.read_text()
    checkpoint = Path(said.partition('checkpoint')[2].split()[0])
    assert 'state_dict' in torch.load(tmp_path / checkpoint, weights_only=False)
    assert 'tools/train.py configs/pvt/' in said and (REPO / 'configs/pvt/mask-rcnn_pvt-t-dtn_fpn_1x_coco.py').exists()
    assert len(said.splitlines()) < 40, 'a person reads it'
    assert 'Epoch(train)' in (tmp_path / 'work_dirs' / 'demo' / 'log.txt').read_text()


def test_the_summary_has_the_figures_of_readme_for_layernorm_too(monkeypatch):
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '')  # the demo sets this variable, and other tests must not see it
    from tools.demo import LAYERNORM, TRAIN_LAYERNORM, figures

    metrics = {f'coco/{kind}_mAP{suffix}': 0.5 for kind in ('bbox', 'segm') for suffix in ('', '_50')}
    said = figures(metrics, comparable=True)
    readme = (REPO / 'README.md').read_text()
    for kind, row in (('bbox', 'box AP, AP50'), ('segm', 'mask AP')):
        known = '{:.3f}, {:.3f}'.format(*LAYERNORM[kind])
        assert known in said
        (cells,) = re.findall(rf'^\|.*{row}.*`make demo` \|(.*?)\|', readme, re.M)
        assert cells.strip() == known
    command = said.partition('trained by: ')[2].split()
    assert command[1:] == TRAIN_LAYERNORM.split() and all((REPO / path).exists() for path in command[1:3])
    assert 'LayerNorm' not in figures(metrics, comparable=False), 'of other data or another time'
