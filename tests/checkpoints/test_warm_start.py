"""A LayerNorm model that is converted to DTN initially computes the same outputs."""

from functools import partial
from pathlib import Path

import pytest
import torch
from mmengine.config import Config
from mmengine.registry import MODELS

from mmdtn.backbones import PVTDTN, LeViTDTN, SwinDTN, T2TViTDTN, ViTDTN
from mmdtn.checkpoints import translate
from mmdtn.norms import DTN
from mmdtn.norms.dtn import local_start

from ..backbones.helpers import randomised
from . import published

LN = dict(type='LN')
PVT = dict(base='tiny', num_heads=(1, 2, 5, 8), norm_heads=(4, 4, 5, 8))
WARM = {
    'pvt': (PVTDTN, dict(arch='tiny'), dict(arch=PVT, norm_cfg=dict(type='DTN', prenorm=False, eps=1e-6))),
    'pvt_v2': (
        PVTDTN,
        dict(arch='b0'),
        dict(arch=dict(PVT, base='b0'), norm_cfg=dict(type='DTN', prenorm=False, eps=1e-6)),
    ),
    'swin': (SwinDTN, dict(arch='tiny'), dict(arch='tiny', norm_cfg=dict(type='DTN', prenorm=False))),
    'vit': (ViTDTN, dict(arch='t'), dict(arch='t', norm_cfg=dict(type='DTN', prenorm=False, eps=1e-6), cls_from=0)),
    'levit': (
        LeViTDTN,
        dict(arch='128s', img_size=(96, 128)),
        dict(arch='128s', img_size=(96, 128), norm_cfg=dict(type='DTN', prenorm=False)),
    ),
    't2t': (
        T2TViTDTN,
        dict(arch='t-14'),
        dict(arch='t-14', norm_cfg=dict(type='DTN', prenorm=False), dtn_layers=14, cls_from=0),
    ),
}


@pytest.mark.parametrize('kind', WARM)
@torch.no_grad()
def test_outputs_stay(kind):
    backbone, options, warm = WARM[kind]
    before = backbone(**options, norm_cfg=LN)
    before.init_weights()
    randomised(before)
    x = torch.randn(2, 3, 96, 128)
    want = before(x)
    for start, tolerance in ((1.0, 1e-5), (0.999, 1e-2)):
        after = backbone(**warm).eval()
        state, report = translate(before.state_dict(), after, warm_start=start)
        assert report.kept == [] and report.dropped == {}
        after.load_state_dict(state)
        layers = [m for m in after.modules() if isinstance(m, DTN)]
        assert len(report.filled) == 3 * len(layers)
        for layer in layers:
            torch.testing.assert_close(layer.mean_mix.sigmoid(), torch.full_like(layer.mean_mix, start))
            assert torch.equal(layer.var_mix, layer.mean_mix) and layer.mean_mix.isfinite().all()
            local = torch.tensor(local_start(layer.num_heads))
            assert torch.equal(layer.position[: len(local)], local)
        for got, expected in zip(after(x), want, strict=True):
            if start == 1:
                torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
            assert (got - expected).norm() <= tolerance * expected.norm()
            assert start == 1 or not torch.equal(got, expected)


@pytest.mark.parametrize('dtn_layers', [10, 12])
@pytest.mark.parametrize('make', [published.timm_vit, published.mmpretrain_vit], ids=['timm', 'mmpretrain'])
@torch.no_grad()
def test_outputs_of_published_vit_stay(make, dtn_layers):
    peer, x = make(), torch.randn(1, 3, 224, 224)
    (want,) = peer.compute(x)
    options = dict(norm_cfg=dict(type='DTN', prenorm=False, eps=1e-6), dtn_layers=dtn_layers)
    for start in (1.0, 0.999):
        model = ViTDTN('t', **options, cls_from=0).eval()
        state, report = translate(peer.file.get('state_dict', peer.file), model, warm_start=start)
        assert report.kept == [] and len(report.filled) == 3 * 2 * dtn_layers
        model.load_state_dict(state)
        (got,) = model(x)
        if start == 1:
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        assert (start == 1 or not torch.equal(got, want)) and (got - want).norm() <= 1e-2 * want.norm()
    if dtn_layers == 10:
        with pytest.raises(ValueError, match=r'before block 10.*cls_from=0'):
            translate(peer.file.get('state_dict', peer.file), ViTDTN('t', **options), warm_start=0.999)


@pytest.mark.parametrize('make', [published.t2t, published.mmpretrain_t2t], ids=['authors', 'mmpretrain'])
@torch.no_grad()
def test_outputs_of_published_t2t_stay(make):
    peer, x = make(), torch.randn(1, 3, 96, 96)
    (want,) = peer.compute(x)
    (state,) = peer.file.values()
    for start in (1.0, 0.999):
        model = T2TViTDTN('t-14', norm_cfg=dict(type='DTN', prenorm=False), cls_from=0).eval()
        converted, report = translate(state, model, warm_start=start)
        assert report.kept == [] and len(report.filled) == 3 * 2 * 10
        model.load_state_dict(converted)
        (got,) = model(x)
        if start == 1:
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        assert (start == 1 or not torch.equal(got, want)) and (got - want).norm() <= 1e-2 * want.norm()


def test_levit_has_no_norm_that_dtn_could_start_from():
    file = published.levit().file['model']
    for norm in ('DTN', 'LN'):
        with pytest.raises(ValueError, match=r'levit .*norm_cfg=None'):
            translate(file, LeViTDTN('128s', norm_cfg=dict(type=norm)), warm_start=0.999 if norm == 'DTN' else None)


def test_the_lambdas_can_be_learned_from_there():
    model = PVTDTN(PVT, norm_cfg=dict(type='DTN', prenorm=False, eps=1e-6), drop_path_rate=0.0)
    state, _ = translate(PVTDTN('tiny', norm_cfg=LN).state_dict(), model, warm_start=0.999)
    model.load_state_dict(state)
    sum(m.square().mean() for m in model(torch.randn(1, 3, 64, 64))).backward()
    assert all(m.mean_mix.grad.abs().max() > 0 for m in model.modules() if isinstance(m, DTN))


def test_our_own_layernorm_model_keeps_its_attention():
    with pytest.raises(ValueError, match=r'1 heads .*mmdtn-pvt .*4 '):
        wrong = PVTDTN('tiny', norm_cfg=dict(type='DTN', prenorm=False))
        translate(PVTDTN('tiny', norm_cfg=LN).state_dict(), wrong, warm_start=0.999)


@pytest.mark.parametrize(
    ('options', 'start', 'words'),
    [
        (
            dict(arch='tiny', norm_cfg=dict(type='DTN', prenorm=False)),
            0.999,
            ' 1 heads in .* 4 in .*num_heads',
        ),
        (dict(arch=PVT), 0.999, 'prenorm=False'),
        (dict(arch=PVT, norm_cfg=dict(type='DTN', prenorm=False, mean_lambda=0.5)), 0.999, 'mean_lambda=0.5'),
        (dict(arch=PVT, norm_cfg=dict(type='DTN', prenorm=False)), None, 'mean_mix.*--warm-start'),
        (dict(arch=PVT, norm_cfg=dict(type='DTN', prenorm=False)), 1.5, 'warm_start=1.5'),
        (dict(arch='tiny', norm_cfg=LN), 0.999, 'no DTN layer'),
    ],
)
def test_what_would_not_be_the_same_model_is_refused(options, start, words):
    with pytest.raises(ValueError, match=words):
        translate(published.mmdet_pvt().file['state_dict'], PVTDTN(**options), warm_start=start)


BACKBONES = Path(__file__).parents[2] / 'configs' / '_base_' / 'backbones'
PEERS = {
    'pvt-t': published.pvt,
    'pvt-s': partial(published.pvt, (3, 4, 6, 3)),
    'pvtv2-b0': published.pvt_v2,
    'pvtv2-b2': partial(published.pvt_v2, 'b2'),
    'swin-t': published.swin,
    'swin-s': partial(published.swin, 'small', (2, 2, 18, 2)),
}


def test_every_backbone_has_a_published_file():
    assert {path.stem for path in BACKBONES.glob('*.py')} == {*PEERS}


@pytest.mark.slow
@pytest.mark.parametrize('name', PEERS)
@torch.no_grad()
def test_backbones_of_detectors_start_from_the_published_file(name, tmp_path):
    torch.save(PEERS[name]().file, tmp_path / 'theirs.pth')
    cfg = Config.fromfile(BACKBONES / f'{name}.py')
    maps = []
    for backbone in (cfg.dtn, cfg.ln):
        backbone.init_cfg.checkpoint = str(tmp_path / 'theirs.pth')
        model = MODELS.build(backbone)
        model.init_weights()
        assert any(isinstance(m, DTN) for m in model.modules()) == (backbone is cfg.dtn)
        maps.append(model.eval()(torch.ones(1, 3, 64, 96).cumsum(-1) / 50))
    for got, want in zip(*maps, strict=True):
        assert 0 < (got - want).norm() <= 1e-2 * want.norm()
