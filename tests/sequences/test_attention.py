"""Compares the attention modules with torch's full attention under an explicit mask."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from mmdtn.sequences import BigBirdAttention, FullAttention, ReformerAttention
from mmdtn.sequences.attention import bigbird_mask

C, HEADS = 24, 4
KINDS = dict(
    full=lambda tokens: FullAttention(C, HEADS, tokens, dropout=0.0),
    bigbird=lambda tokens: BigBirdAttention(C, HEADS, tokens, layer=2, block_size=4),
    reformer=lambda tokens: ReformerAttention(C, HEADS, tokens),
)


def batch(tokens, lengths, seed=0):
    x = torch.randn(len(lengths), tokens, C, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x, torch.arange(tokens) < torch.tensor(lengths)[:, None]


def heads(x):
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


def gradients(y, real, inputs):
    weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(9), dtype=y.dtype)
    return torch.autograd.grad((y * weight)[real].sum(), inputs)


def published_random_blocks(blocks, seed, draws=3, last=15):
    """Yields the random blocks of each row for each head, as Long-Range Arena draws them for 2048 tokens."""
    generator = np.random.RandomState(seed)
    for _ in range(HEADS):
        rows = {}
        for row in range(1, blocks - 1):
            if row <= 2:
                allowed = list(range(row + 2, last + 1))
            elif row >= blocks - 3:
                allowed = list(range(1, last - 3 if row == blocks - 3 else last - 2))
            elif row <= last + 1:
                allowed = list(range(1, row - 1)) + ([] if row + 1 == last else list(range(row + 2, last + 1)))
            else:
                allowed = list(range(1, last + 1))
            rows[row] = {*generator.permutation(allowed)[:draws]}
        yield rows


@pytest.mark.parametrize('layer', [0, 3])
def test_the_mask_of_bigbird_is_the_published_one(layer):
    mask = bigbird_mask(32, HEADS, layer)
    for head, random in zip(mask, published_random_blocks(32, layer), strict=True):
        assert head[0].all() and head[-1].all() and head[:, 0].all() and head[:, -1].all()
        for row in range(1, 31):
            window = {0, 31, row - 1, row, row + 1}
            assert not window & random[row] and len(random[row]) == 3
            assert {*head[row].nonzero()[:, 0].tolist()} == window | random[row]


@pytest.mark.parametrize('blocks', [1, 2, 3, 4])
def test_up_to_four_blocks_are_all_seen(blocks):
    assert bigbird_mask(blocks, HEADS, 0).all()
    x, real = batch(4 * blocks - 1, [4 * blocks - 1, 1])
    bigbird, full = KINDS['bigbird'](4 * blocks).double(), KINDS['full'](4 * blocks).double()
    full.load_state_dict(bigbird.state_dict())
    torch.testing.assert_close(bigbird(x, real), full(x, real))


@pytest.mark.parametrize('blocks', [6, 9, 17])
def test_bigbird_is_full_attention_under_its_mask(blocks):
    tokens = 4 * blocks - 2
    module = KINDS['bigbird'](tokens).double()
    x, real = batch(tokens, [tokens, 3, tokens // 2])
    x.requires_grad_()
    mask = bigbird_mask(blocks, HEADS, seed=2, random_from=256)
    assert mask.all() == (blocks < 9)
    mask = mask.repeat_interleave(4, 1).repeat_interleave(4, 2)[:, :tokens, :tokens] & real[:, None, None]
    q, k, v = (heads(layer(x)) for layer in (module.q, module.k, module.v))
    want = module.out(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2))
    got = module(x, real)
    torch.testing.assert_close(got[real], want[real])
    inputs = [x, *module.parameters()]
    for one, other in zip(gradients(got, real, inputs), gradients(want, real, inputs), strict=True):
        torch.testing.assert_close(one, other)


def test_the_random_blocks_are_among_the_first():
    far = bigbird_mask(20, HEADS, 0, random_from=6)[:, 10:-3]
    window = (torch.arange(10, 17)[:, None] - torch.arange(20)).abs() <= 1
    assert not (far & ~window)[..., 6:-1].any() and (far & ~window)[..., 1:6].sum(-1).eq(3).all()


def reformer_mask(module, x, real):
    """Computes the mask of Reformer for each pair of tokens, without chunked tensors."""
    T = x.shape[1]
    x, real = F.pad(x, (0, 0, 0, 80 - T)), F.pad(real, (0, 80 - T))
    rotated = heads(module.qk(x)) @ module.rotation.double()
    buckets = torch.cat((rotated, -rotated), -1).argmax(-1)
    mask = torch.zeros(len(x), HEADS, 80, 80, dtype=torch.bool)
    for b in range(len(x)):
        for h in range(HEADS):
            key = [(int(buckets[b, h, t]) if real[b, t] else 99, t) for t in range(80)]
            place = {t: p for p, (_, t) in enumerate(sorted(key))}
            chunk = torch.tensor([place[t] // 8 for t in range(80)])
            near = (chunk[:, None] == chunk) | ((chunk[:, None] - 1) % 10 == chunk)
            mask[b, h] = near & real[b]
    return mask[:, :, :T, :T]


def test_reformer_is_full_attention_under_its_mask():
    module = KINDS['reformer'](80).double()
    x, real = batch(77, [77, 40, 9])
    x.requires_grad_()
    mask = reformer_mask(module, x, real)
    own = torch.eye(77, dtype=torch.bool)
    others = mask & ~own
    mask = others | (own & ~others.any(-1, keepdim=True))
    qk, v = heads(module.qk(x)), heads(module.v(x))
    scores = (qk @ qk.mT / math.sqrt(C // HEADS)).masked_fill(~mask, -math.inf)
    want = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
    got = module(x, real)
    torch.testing.assert_close(got[real], want[real])
    inputs = [x, *module.parameters()]
    for one, other in zip(gradients(got, real, inputs), gradients(want, real, inputs), strict=True):
        torch.testing.assert_close(one, other)


def test_one_chunk_of_reformer_is_full_attention_with_shared_queries_and_keys():
    module = ReformerAttention(C, HEADS, 20, num_chunks=1).double()
    x, real = batch(20, [20, 2])
    qk, v = heads(module.qk(x)), heads(module.v(x))
    mask = real[:, None, None] & ~torch.eye(20, dtype=torch.bool)
    want = F.scaled_dot_product_attention(qk, qk, v, attn_mask=mask).transpose(1, 2).flatten(2)
    torch.testing.assert_close(module(x, real)[real], want[real])


def test_a_token_alone_attends_to_itself():
    module = KINDS['reformer'](80).double()
    x, real = batch(30, [1])
    torch.testing.assert_close(module(x, real)[:, 0], module.v(x[:, 0]))


def test_tokens_of_other_chunks_change_nothing():
    module = KINDS['reformer'](80).double()
    x, real = batch(80, [80])
    mask = reformer_mask(module, x, real)[0]
    token = 33
    unseen = (~mask[:, token].any(0)).nonzero()[:, 0]
    assert len(unseen) > 10
    bucket = torch.cat((r := heads(module.qk(x)) @ module.rotation.double(), -r), -1).argmax(-1)[0]
    alike = [(i, j) for i in unseen for j in unseen if i < j and (bucket[:, i] == bucket[:, j]).all()]
    values = x.clone()
    pairs = alike or [(unseen[0], unseen[0])]
    for i, j in pairs[:1]:
        values[:, [i, j]] = x[:, [j, i]]
    torch.testing.assert_close(module(values, real)[:, token], module(x, real)[:, token])
    # Scaling the unseen tokens does not change their buckets, so the output of this token should not change.
    values = x.clone()
    values[:, unseen] *= 3
    assert not torch.equal(module(values, real), module(x, real))
    torch.testing.assert_close(module(values, real)[:, token], module(x, real)[:, token])


def test_the_hash_is_one_for_all_layers_and_seeds():
    one = ReformerAttention(C, HEADS, 80, layer=0)
    torch.manual_seed(5)
    other = ReformerAttention(C, HEADS, 80, layer=3)
    assert torch.equal(one.rotation, other.rotation) and one.rotation.shape == (C // HEADS, 5)


@pytest.mark.parametrize('kind', KINDS)
def test_neither_number_nor_content_of_the_padding_matters(kind):
    module = KINDS[kind](80).double()
    x, real = batch(50, [50, 21])
    want = module(x, real)
    wanted = gradients(want, real, list(module.parameters()))
    for tokens, fill in ((57, 0.0), (80, 1e3)):
        padded = torch.full((2, tokens, C), fill, dtype=torch.float64)
        padded[:, :50][real] = x[real]
        mask = F.pad(real, (0, tokens - 50))
        got = module(padded, mask)
        torch.testing.assert_close(got[mask], want[real])
        weight = torch.zeros_like(got)
        weight[:, :50] = torch.randn(want.shape, generator=torch.Generator().manual_seed(9), dtype=want.dtype)
        for one, other in zip(
            torch.autograd.grad((got * weight)[mask].sum(), list(module.parameters())), wanted, strict=True
        ):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize('kind', ['bigbird', 'reformer'])
def test_too_many_tokens(kind):
    x, real = batch(81, [81])
    with pytest.raises(ValueError, match=r'81 tokens.*80'):
        KINDS[kind](80).double()(x, real)


@pytest.mark.parametrize('kind', [FullAttention, BigBirdAttention, ReformerAttention])
def test_heads_divide_channels(kind):
    with pytest.raises(ValueError, match='num_heads=5 does not divide 24'):
        kind(C, 5, 80)


@pytest.mark.parametrize('kind', KINDS)
def test_half_precision(kind):
    module = KINDS[kind](80)
    x, real = batch(60, [60, 1])
    want = module(x.float(), real)
    with torch.autocast('cpu', dtype=torch.bfloat16):
        got = module(x.float(), real)
    assert got[real].isfinite().all() and (got - want)[real].abs().mean() < 0.05
