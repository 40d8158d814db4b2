"""Compares attention distances with examples computed by hand, and attention with the outputs of the modules."""

import math

import numpy as np
import pytest
import timm
import torch
from torch import nn

from mmdtn.analysis import BlockTokens, Capture, attention, attention_distance, class_token_attention
from mmdtn.backbones import PVTDTN, ViTDTN, levit
from mmdtn.backbones.layers import Attention, Block
from mmdtn.backbones.swin import WindowAttention
from mmdtn.checkpoints import from_timm_vit
from mmdtn.norms import Place

# Ordered pairs of a 3 x 3 grid by distance: 9 at 0, 24 at 1, 12 at 2, 16 at sqrt 2, 16 at sqrt 5, and 4 at sqrt 8.
UNIFORM_3X3 = (24 * 1 + 12 * 2 + 16 * math.sqrt(2) + 16 * math.sqrt(5) + 4 * math.sqrt(8)) / 81


def seen(attn: nn.Module, tokens: torch.Tensor, grid: tuple[int, int] | None = None) -> BlockTokens:
    block = Block(tokens.shape[-1], attn, nn.Identity(), 0.0, dict(type='LN'), Place())
    return BlockTokens('block', block, grid or tuple(tokens.shape[1:3]), dict(norm1=tokens), dict(norm1=tokens))


def uniform(attn: nn.Module) -> nn.Module:
    for parameter in attn.parameters():
        nn.init.zeros_(parameter)
    return attn


def windows(channels: int, heads: int, side: int, shifted: bool) -> WindowAttention:
    return WindowAttention(channels, heads, side, shifted=shifted, shift_alone=True)


def test_uniform_attention_on_3x3():
    distance = attention_distance(seen(uniform(Attention(4, 2)), torch.randn(1, 3, 3, 4)))
    assert distance.by_head.tolist() == pytest.approx([UNIFORM_3X3] * 2, rel=1e-6)
    assert distance.uniform == pytest.approx(UNIFORM_3X3, rel=1e-6)


def test_identity_attention_on_3x3():
    attn = Attention(9, 1)
    for weight in (attn.q.weight, attn.kv.weight):
        nn.init.eye_(weight).data.mul_(20)
    distance = attention_distance(seen(attn, torch.eye(9).view(1, 3, 3, 9)))
    assert distance.by_head.tolist() == pytest.approx([0], abs=1e-6)
    assert distance.uniform == pytest.approx(UNIFORM_3X3, rel=1e-6), 'the scale to compare with does not change'


def test_each_query_looking_one_token_to_the_right():
    attn = Attention(4, 1)
    nn.init.eye_(attn.q.weight).data.mul_(20)
    attn.kv.weight.data[:4] = 20 * torch.eye(4).roll(-1, 0)  # the query of each token matches the key of the next token
    distance = attention_distance(seen(attn, torch.eye(4).view(1, 1, 4, 4)))
    assert distance.by_head.tolist() == pytest.approx(
        [(1 + 1 + 1 + 3) / 4], abs=1e-5
    )  # the last token attends to the first


def test_reduced_keys_are_at_the_centre_of_what_they_stand_for():
    attn = uniform(Attention(4, 1, 2, nn.LayerNorm(4)))
    places = [(y, x) for y in range(4) for x in range(6)]
    keys = [(y, x) for y in (0.5, 2.5) for x in (0.5, 2.5, 4.5)]
    by_hand = np.mean([math.dist(p, k) for p in places for k in keys])
    assert attention_distance(seen(attn, torch.randn(1, 4, 6, 4))).by_head.tolist() == pytest.approx([by_hand])


def test_windows_of_2x2_and_shifted_by_one():
    tokens = torch.randn(1, 4, 4, 4)
    square = (0 + 1 + 1 + math.sqrt(2)) / 4
    plain = attention_distance(seen(uniform(windows(4, 2, 2, shifted=False)), tokens))
    assert plain.by_head.tolist() == pytest.approx([square] * 2) and plain.uniform == pytest.approx(square)
    # Along each axis the windows contain tokens 0 | 1 2 | 3, which makes one square, four pairs and four single tokens.
    shifted = attention_distance(seen(uniform(windows(4, 2, 2, shifted=True)), tokens))
    assert shifted.by_head.tolist() == pytest.approx([(4 * square + 8 * 0.5 + 4 * 0) / 16] * 2)
    assert shifted.uniform == pytest.approx(shifted.by_head[0].item())


def test_padding_is_a_key_but_no_query():
    distance = attention_distance(seen(uniform(windows(4, 1, 2, shifted=False)), torch.randn(1, 1, 2, 4)))
    assert distance.by_head.tolist() == pytest.approx([(0 + 1 + 1 + math.sqrt(2)) / 4])
    (part,) = attention(seen(windows(4, 1, 2, shifted=False), torch.randn(1, 1, 2, 4)))
    assert part.inside.sum() == 2


@pytest.mark.parametrize('shifted', [False, True])
@pytest.mark.parametrize('grid', [(6, 9), (7, 10), (2, 2)])
def test_window_attention_at_these_places_makes_the_output(grid, shifted):
    torch.manual_seed(0)
    attn, tokens = windows(8, 2, 3, shifted), torch.randn(1, *grid, 8)
    nn.init.normal_(attn.relative_position_bias_table)
    height, width = (-(-side // 3) * 3 for side in grid)
    padded = torch.zeros(1, height, width, 8)
    padded[:, : grid[0], : grid[1]] = tokens
    value = attn.qkv(padded.flatten(1, 2))[0, :, 16:].view(-1, 2, 4).transpose(0, 1)
    (part,) = attention(seen(attn, tokens))
    dense = torch.zeros(2, height * width, height * width)
    queries, keys = ((p[..., 0] * width + p[..., 1]).long() for p in (part.queries, part.keys))
    for weights, q, k, allowed in zip(part.weights, queries, keys, part.allowed, strict=True):
        dense[:, q[:, None], k[None]] = weights
        assert (weights > 0).all(0).equal(allowed)
    out = attn.proj((dense @ value).transpose(0, 1).reshape(height, width, 8))[: grid[0], : grid[1]]
    torch.testing.assert_close(out, attn(tokens)[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize('reduction', [1, 2])
def test_attention_over_the_map_makes_the_output(reduction):
    torch.manual_seed(0)
    attn, tokens = Attention(8, 2, reduction, nn.LayerNorm(8)), torch.randn(1, 24, 26, 8)
    values = []
    attn.kv.register_forward_hook(lambda module, inputs, output: values.append(output[..., 8:]))
    parts = list(attention(seen(attn, tokens)))
    assert len(parts) > 1, 'so that chunks are put to the test'
    weights = torch.cat([part.weights[0] for part in parts], 1)
    value = values[0].view(-1, 2, 4).transpose(0, 1)
    out = attn.proj((weights @ value).transpose(0, 1).reshape(24, 26, 8))
    torch.testing.assert_close(out, attn(tokens)[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize('shrinking', [False, True])
def test_attention_of_levit_makes_the_output(shrinking):
    torch.manual_seed(0)
    attn = levit.ShrinkingAttention(16, 24, 8, (5, 7)) if shrinking else levit.LeViTAttention(16, 8, 2, (5, 7))
    attn.eval()
    tokens, values = torch.randn(1, 5, 7, 16), []
    nn.init.normal_(attn.attention_biases)
    nn.init.normal_(attn.proj.ln.bn.weight)
    layer = attn.kv if shrinking else attn.qkv
    layer.register_forward_hook(lambda module, inputs, output: values.append(output.unflatten(2, (2, -1))))
    (part,) = attention(seen(attn, tokens))
    every_second = [(y, x) for y in (0, 2, 4) for x in (0, 2, 4, 6)]
    places = [(y, x) for y in range(5) for x in range(7)]
    assert part.keys[0].tolist() == [[*place] for place in places]
    assert part.queries[0].tolist() == [[*place] for place in (every_second if shrinking else places)]
    value = values[0][0, :, :, 8 if shrinking else 16 :].transpose(0, 1)
    out = attn.proj((part.weights[0] @ value).transpose(0, 1).flatten(1)[None])
    torch.testing.assert_close(out, attn(tokens).flatten(1, 2), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize('shape', [(5, 7), (8, 6)])
@pytest.mark.parametrize('reduction', [1, 2])
def test_relative_position_is_part_of_attention(reduction, shape):
    attn = Attention(8, 2, reduction, nn.LayerNorm(8), rpe=True)
    uniform(attn.q)  # attention then depends on the bias only
    attn.rpe.position.data = torch.tensor([[-1.0, 0.0, 0.0], [-1.0, 2.0, 0.0]])  # maximum at the token; at its right
    parts = attention(seen(attn, torch.randn(1, *shape, 8)))
    for part in parts:
        shift = (part.keys[0] - part.queries[0, :, None]) / reduction
        at_token, right = ((shift - torch.tensor(at)).square().sum(-1) for at in ((0.0, 0.0), (0.0, 1.0)))
        torch.testing.assert_close(part.weights[0, 0], (-at_token).softmax(-1))
        torch.testing.assert_close(part.weights[0, 1], (-right).softmax(-1))


@pytest.mark.parametrize(
    'model',
    [
        ViTDTN('t', norm_cfg=dict(type='LN')),
        ViTDTN('t*'),
        ViTDTN('t*', cls_from=0, dtn_layers=12),
        PVTDTN('tiny', out_type='cls_token', norm_cfg=dict(type='LN')),
    ],
    ids=['class token from the start', 'late class token', 'from the start, with DTN', 'class token of the last stage'],
)
def test_the_class_token_has_no_place(model):
    with Capture(model.eval()) as capture, torch.no_grad():
        model(torch.randn(1, 3, 64, 96))
    last = capture.blocks[-1]
    height, width = last.grid
    assert last.has_class_token and last.on_grid(last.before['norm1']).shape[1:3] == (height, width)
    assert last.before['norm1'].shape[2] == height * width + 1
    weights = torch.cat([part.weights[0] for part in attention(last)], 1)
    assert weights.shape[1:] == (height * width, height * width)
    torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:2]))
    places = torch.tensor([(y, x) for y in range(height) for x in range(width)], dtype=torch.float)
    by_hand = (weights * torch.cdist(places, places)).sum(-1).mean(-1)
    torch.testing.assert_close(attention_distance(last).by_head.float(), by_hand)


def test_a_second_image_of_the_batch():
    attn, tokens = Attention(8, 2), torch.randn(2, 3, 5, 8) * 4
    both = seen(attn, tokens)
    alone = attention_distance(seen(attn, tokens[1:])).by_head
    torch.testing.assert_close(attention_distance(both, image=1).by_head, alone)
    assert not torch.allclose(attention_distance(both, image=0).by_head, alone)


@torch.no_grad()
def test_attention_of_the_class_token_is_that_of_timms_vit():
    peer = timm.create_model('vit_tiny_patch16_224', num_classes=0, dynamic_img_size=True).eval()
    model = ViTDTN('t', norm_cfg=dict(type='LN'), cls_from=0).eval()
    model.load_state_dict(from_timm_vit(peer.state_dict()))
    weights = []
    attn = peer.blocks[-1].attn
    attn.fused_attn = False
    attn.attn_drop.register_forward_hook(lambda module, inputs, output: weights.append(output))
    x = 5 * torch.randn(2, 3, 64, 96)
    peer(x)
    with Capture(model) as captured:
        model(x)
    found = class_token_attention(captured.blocks[-1], image=1)
    assert found.shape == (3, 4, 6)
    torch.testing.assert_close(found.flatten(1), weights[0][1, :, 0, 1:], rtol=1e-4, atol=1e-6)
    with_dtn = ViTDTN('t')
    with Capture(with_dtn) as captured:
        with_dtn(x)
    assert class_token_attention(captured.blocks[-1]).shape == (3, 4, 6)
    with pytest.raises(ValueError, match='class token'):
        class_token_attention(captured.blocks[0])
