"""Every kind of published file goes through the command; then our model computes what theirs did."""

import sys

import pytest
import torch
from mmengine.registry import MODELS

from tools.model_converters import convert as command

from . import published


def run(monkeypatch, *args):
    monkeypatch.setattr(sys, 'argv', ['convert.py', *map(str, args)])
    command.main()


@pytest.mark.parametrize('make', published.ALL, ids=lambda make: make.__name__)
@pytest.mark.slow
@pytest.mark.parametrize('way', ['command', 'init_cfg'])
@torch.no_grad()
def test_outputs_are_the_peers(make, way, tmp_path, monkeypatch, capsys):
    torch.manual_seed(0)
    peer = make()
    source, out = tmp_path / 'theirs.pth', tmp_path / 'ours.pth'
    torch.save(peer.file, source)
    if way == 'init_cfg':
        out = source
    else:
        run(monkeypatch, source, '--to', peer.to, '--out', out, '--from', peer.said)
        assert 'keeps its own start' not in capsys.readouterr().out
    cfg = dict(dict(norm_cfg=dict(type='LN')) | peer.backbone, init_cfg=dict(type='Pretrained', checkpoint=str(out)))
    ours = MODELS.build(cfg)
    ours.init_weights()
    ours.eval()
    x = torch.randn(2, 3, peer.side, peer.side)
    for got, want in zip(ours(x), peer.compute(x), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
