"""Files of all formats are converted by the command. Our models then compute the same outputs."""

import sys

import pytest
import torch
from mmengine.model import PretrainedInit
from mmengine.registry import MODELS

from tools.model_converters import convert as command

from . import published


@pytest.mark.slow
@pytest.mark.parametrize('make', published.ALL, ids=lambda make: make.__name__)
@torch.no_grad()
def test_outputs_are_the_peers(make, tmp_path, monkeypatch, capsys):
    """``init_cfg`` loads the original file and the converted one."""
    torch.manual_seed(0)
    peer = make()
    source, converted = tmp_path / 'theirs.pth', tmp_path / 'ours.pth'
    torch.save(peer.file, source)
    arguments = [source, '--to', peer.to, '--out', converted, '--from', peer.said]
    monkeypatch.setattr(sys, 'argv', ['convert.py', *map(str, arguments)])
    command.main()
    assert 'keeps its initial value' not in capsys.readouterr().out
    ours = MODELS.build(dict(norm_cfg=dict(type='LN')) | peer.backbone).eval()
    x = torch.randn(2, 3, peer.side, peer.side)
    expected = peer.compute(x)
    for path in (source, converted):
        ours.apply(blank)
        ours.init_cfg = dict(type='Pretrained', checkpoint=str(path))
        ours.init_weights()
        for got, want in zip(ours(x), expected, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def blank(module):
    for parameter in module.parameters(recurse=False):
        parameter.fill_(torch.nan)


@pytest.mark.parametrize('kind', ['Pretrained', 'mmengine.Pretrained', PretrainedInit])
def test_init_cfg_knows_the_format_however_its_type_is_named(kind, tmp_path):
    """MMEngine's own loading would not find timm's names, and leave the model unchanged."""
    peer = published.timm_pvt()
    torch.save(peer.file, tmp_path / 'theirs.pth')
    init_cfg = dict(type=kind, checkpoint=str(tmp_path / 'theirs.pth'))
    ours = MODELS.build(dict(peer.backbone, norm_cfg=dict(type='LN'), init_cfg=init_cfg))
    ours.init_weights()
    assert any(torch.equal(ours.stages[0].blocks[0].attn.q.weight, value) for value in peer.file.values())
