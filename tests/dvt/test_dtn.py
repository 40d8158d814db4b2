"""DTN in a cascade, with image tokens on the grid of their exit and a class token in front."""

import pytest
import torch

from mmdtn import checkpoints
from mmdtn.dvt import DVT
from mmdtn.norms import DTN

from ..backbones.helpers import randomised
from .published import weights
from .small import ARCHS, images, samples, small
from .test_published import SMALL, cascade

FAMILIES = list(ARCHS)
EPS = dict(t2t=1e-5, deit=1e-6)


def test_where_dtn_sits():
    with torch.device('meta'):
        model = DVT('t2t-12', norm_cfg=dict(type='DTN'), dtn_layers=10)
    found = {name: m for name, m in model.named_modules() if isinstance(m, DTN)}
    assert set(found) == {f'exits.{k}.blocks.{i}.norm{n}' for k in range(3) for i in range(10) for n in (1, 2)}
    assert {(m.num_features, m.num_heads, m.pool_size) for m in found.values()} == {(256, 4, 1), (304, 4, 1)}


@pytest.mark.parametrize('family', FAMILIES)
@torch.no_grad()
def test_with_lambdas_of_one_and_no_prenorm_it_is_layernorm(family):
    plain = randomised(small(family))
    cfg = dict(type='DTN', prenorm=False, mean_lambda=1.0, var_lambda=1.0, eps=EPS[family])
    model = small(family, norm_cfg=cfg).eval()
    missing, unexpected = model.load_state_dict(plain.state_dict(), strict=False)
    assert not unexpected and all(name.endswith('.position') for name in missing)
    for got, want in zip(model(images(family)), plain(images(family)), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


@pytest.mark.parametrize('family', FAMILIES)
@torch.no_grad()
def test_a_published_file_becomes_a_cascade_with_dtn(family):
    file = weights(SMALL[family])
    plain = cascade(SMALL[family])
    plain.load_state_dict(checkpoints.translate(file, plain)[0])
    model = cascade(SMALL[family], norm_cfg=dict(type='DTN', prenorm=False, eps=EPS[family]))
    ours, report = checkpoints.translate(file, model, warm_start=1.0)
    assert sum('lambda' in what for what in report.filled.values()) > 0
    model.load_state_dict(ours)
    x = torch.randn(1, 3, 224, 224)
    for got, want in zip(model(x), plain(x), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-5 * want.abs().max().item())


@pytest.mark.parametrize('family', FAMILIES)
def test_every_parameter_learns_and_any_size_works(family):
    model = small(family, norm_cfg=dict(type='DTN'), dtn_layers=1)
    model.init_weights()
    sum(model(images(family), samples(2), mode='loss').values()).backward()
    assert [n for n, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()] == []
    moved = [n for n, p in model.named_parameters() if n.endswith(('_mix', 'position')) and p.grad.abs().sum() > 0]
    assert len(moved) == 3 * 2 * 3
    side = ARCHS[family]['img_size']
    assert all(logits.isfinite().all() for logits in model(torch.randn(1, 3, 2 * side, side)))


@torch.no_grad()
def test_image_tokens_are_normalised_on_the_grid_of_their_exit():
    model = randomised(small('deit', norm_cfg=dict(type='DTN')))
    seen = []
    for exit in model.exits:
        norm = exit.blocks[0].norm1
        norm.register_forward_hook(lambda norm, inputs, output: seen.append((norm, inputs[0], output)))
    model(images('deit'))
    for (norm, x, y), side in zip(seen, (3, 4, 7), strict=True):
        norm._forward_hooks.clear()
        want = norm(x[:, 1:].unflatten(1, (side, side))).flatten(1, 2)
        torch.testing.assert_close(y[:, 1:], want, rtol=0, atol=1e-6)
