"""Compares relative position in attention (Eq. 6 of the paper) with loops and with additional channels of q and k."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mmdtn.backbones import PVTDTN, ViTDTN
from mmdtn.backbones.layers import Attention, RelativePosition
from mmdtn.checkpoints import translate
from mmdtn.norms import DTN
from mmdtn.norms.dtn import local_start

from .helpers import randomised

LN = dict(type='LN')
VIT = dict(arch=dict(width=36, depth=4, num_heads=9, mlp_ratio=2), dtn_layers=3, img_size=64, patch_size=8)
PVT = dict(base='tiny', depths=(1, 1, 1, 1), widths=(16, 32, 40, 64), mlp_ratios=(2, 2, 2, 2))


def in_three_more_channels(attn: Attention, x: torch.Tensor, origin: float = 0.0) -> torch.Tensor:
    """Leaves out terms that are equal for all keys of a query, because the softmax cancels them."""
    B, H, W, _ = x.shape
    keys = x if attn.sr_ratio == 1 else attn.norm(attn.sr(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1))
    q = attn.q(x).flatten(1, 2).unflatten(-1, (attn.num_heads, -1)).transpose(1, 2)
    k, v = attn.kv(keys).flatten(1, 2).unflatten(-1, (2, attn.num_heads, -1)).permute(2, 0, 3, 1, 4)

    def places(height, width, side):
        """Returns ``(x, y)`` of the centres of tokens, in units of ``side`` tokens."""
        y, x = torch.cartesian_prod(torch.arange(height), torch.arange(width)).double().unbind(1)
        return ((t + 0.5) / side - 0.5 + origin for t in (x, y))

    a1, a2, a3 = attn.rpe.position[..., None].unbind(1)
    qx, qy = places(H, W, attn.sr_ratio)
    kx, ky = places(*keys.shape[1:3], 1)
    of_q = torch.stack((a2 - 2 * a1 * qx, a3 - 2 * a1 * qy, (a1 + 0 * qx)), -1)
    of_k = torch.stack((kx, ky, kx**2 + ky**2), -1)
    scale = math.sqrt(q.shape[-1])
    q = torch.cat((q / scale, of_q.expand(B, -1, -1, -1)), -1)
    k = torch.cat((k, of_k.expand(B, attn.num_heads, -1, -1)), -1)
    out = F.scaled_dot_product_attention(q, k, v, scale=1.0)
    return attn.proj(out.transpose(1, 2).reshape(x.shape))


@pytest.mark.parametrize('grid', [(6, 8), (7, 9)])
@pytest.mark.parametrize('sr_ratio', [1, 2, 4])
def test_it_is_three_more_channels_wherever_the_origin_is(sr_ratio, grid):
    attn = randomised(Attention(12, 3, sr_ratio, nn.LayerNorm(12), rpe=True)).double()
    attn.rpe.position.data.normal_()
    x = torch.randn(2, *grid, 12, dtype=torch.float64, requires_grad=True)
    for origin in (0.0, 5.0):
        got, want = attn(x), in_three_more_channels(attn, x, origin)
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)  # the bias is computed in float32
        parameters = [x, *attn.parameters()]
        for a, b in zip(*(torch.autograd.grad(y.square().sum(), parameters) for y in (got, want)), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(('sr_ratio', 'keys'), [(1, (4, 5)), (2, (2, 2))])
@torch.no_grad()
def test_the_bias_by_loops(sr_ratio, keys):
    layer = RelativePosition(2, sr_ratio)
    layer.position.normal_()
    queries = (4, 5)
    bias = layer(queries, keys).view(2, *queries, *keys)
    for qy, qx, ky, kx in itertools.product(*map(range, (*queries, *keys))):
        dy, dx = (key - ((query + 0.5) / sr_ratio - 0.5) for key, query in ((ky, qy), (kx, qx)))
        for head, (a1, a2, a3) in enumerate(layer.position.tolist()):
            want = a1 * (dx**2 + dy**2) + a2 * dx + a3 * dy
            assert bias[head, qy, qx, ky, kx].item() == pytest.approx(want, abs=1e-5)


@torch.no_grad()
def test_coefficients_of_zero_are_plain_attention():
    attn, plain = (randomised(Attention(12, 3, rpe=rpe)) for rpe in (True, False))
    state = attn.state_dict()
    plain.load_state_dict({key: value for key, value in state.items() if key != 'rpe.position'})
    x = torch.randn(2, 5, 7, 12)
    assert not torch.allclose(attn(x), plain(x), atol=1e-5)
    attn.rpe.position.zero_()
    torch.testing.assert_close(attn(x), plain(x))


def test_it_starts_almost_flat_or_local():
    model = ViTDTN(**VIT, norm_cfg=LN, rpe=True)
    model.init_weights()
    starts = torch.stack([block.attn.rpe.position for block in model.blocks[:3]])
    assert 0.01 < starts.std() < 0.03 and starts.abs().max() < 0.1
    model = ViTDTN(**VIT, norm_cfg=LN, rpe='local')
    model.init_weights()
    assert torch.equal(model.blocks[0].attn.rpe.position, torch.tensor(local_start(9)))


def test_it_sits_where_dtn_would():
    def found(model):
        return {n: (m.sr_ratio, len(m.position)) for n, m in model.named_modules() if isinstance(m, RelativePosition)}

    with torch.device('meta'):
        vit, pvt = ViTDTN('s*', norm_cfg=LN, rpe=True), PVTDTN('tiny', norm_cfg=LN, rpe=True, out_type='cls_token')
        plain = ViTDTN('s*', norm_cfg=LN), PVTDTN('tiny', norm_cfg=LN, out_type='cls_token')
    assert found(vit) == {f'blocks.{i}.attn.rpe': (1, 9) for i in range(10)} and vit.cls_from == 10
    by_stage = [(8, 1), (4, 2), (2, 5)]
    assert found(pvt) == {f'stages.{i}.blocks.{j}.attn.rpe': by_stage[i] for i in range(3) for j in range(2)}
    added = [sum(p.numel() for p in a.parameters()) for a in (vit, pvt)]
    without = [sum(p.numel() for p in a.parameters()) for a in plain]
    assert [a - b for a, b in zip(added, without, strict=True)] == [3 * 9 * 10, 3 * 2 * (1 + 2 + 5)]
    assert not any(isinstance(m, DTN) for m in (*vit.modules(), *pvt.modules()))


@torch.no_grad()
def test_a_file_without_it_gives_plain_attention_and_says_so():
    before = randomised(PVTDTN(PVT, norm_cfg=LN))
    after = PVTDTN(PVT, norm_cfg=LN, rpe=True).eval()
    state, report = translate(before.state_dict(), after)
    after.load_state_dict(state)
    assert report.filled.keys() == {f'stages.{i}.blocks.0.attn.rpe.position' for i in range(3)}
    assert all('rpe' in why for why in report.filled.values())
    x = torch.randn(1, 3, 64, 96)
    for got, want in zip(after(x), before(x), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_half_precision_keeps_the_shift_far_from_the_origin():
    """Additional channels would be too inaccurate: in bfloat16 the squares of neighbours at 55 are equal."""
    attn = Attention(16, 1, rpe='local')
    nn.init.zeros_(attn.q.weight)
    x = torch.randn(1, 56, 56, 16)
    with torch.autocast('cpu', torch.bfloat16):
        rough = attn(x)
    torch.testing.assert_close(rough.float(), attn(x), rtol=0.02, atol=0.02)


@pytest.mark.parametrize(
    ('backbone', 'options', 'words'),
    [
        (ViTDTN, dict(rpe='lokal'), "rpe='lokal'.*True, 'local'"),
        (ViTDTN, dict(norm_cfg=LN, rpe=True, cls_from=0), r'rpe.*dtn_layers=10.*cls_from'),
        (ViTDTN, dict(norm_cfg=LN, rpe=True, dtn_layers=12), 'cannot join before block 12'),
        (PVTDTN, dict(rpe='Local'), "rpe='Local'"),
        (PVTDTN, dict(norm_cfg=LN, rpe=True, dtn_stages=(3,), out_type='cls_token'), '3 .*dtn_stages'),
    ],
)
def test_options_that_make_no_model(backbone, options, words):
    with pytest.raises(ValueError, match=words):
        backbone(**options)
