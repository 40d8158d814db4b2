"""Every norm on padded sequences: what the padding is makes no difference, and real tokens come out as without it."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mmdtn.norms import DTN, SN, DTN2d, LayerNorm, Place, TokenBN, TokenIN, build_norm
from mmdtn.norms.dtn import line_start

from .helpers import random_steps
from .test_normalisers import NORMS, SHORT

C, HEADS = 12, 3
LENGTHS = [9, 5, 1, 5]
T = max(LENGTHS)
REAL = torch.arange(T) < torch.tensor(LENGTHS)[:, None]
ALL = ['LN', 'DTN', *NORMS]


def make(name, **options):
    cfg = dict(type=name) | SHORT.get(name, {}) | options
    norm = build_norm(cfg, C, Place(num_heads=HEADS, position_init='line')).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in norm.parameters():
            p.add_(0.3 * torch.randn(p.shape, generator=generator, dtype=p.dtype))
    return norm


def padded(x, tokens, fill):
    """The real tokens of ``x`` in front of ``tokens`` others."""
    new = torch.full((len(x), x.shape[1] + tokens, x.shape[2]), fill, dtype=x.dtype)
    new[:, : x.shape[1]][REAL] = x[REAL]
    return new


def step(norm, x, g):
    """Real outputs, real gradients, gradients of all parameters, and the state after the step."""
    real = F.pad(REAL, (0, x.shape[1] - T))
    x = x.clone().requires_grad_()
    norm.zero_grad()
    y = norm(x, lengths=LENGTHS)
    assert y.shape == x.shape and not y[~real].any()
    (y[real] * g[REAL]).sum().backward()
    return [y[real], x.grad[real], *(p.grad for p in norm.parameters()), *(b.clone() for b in norm.buffers())]


@pytest.mark.parametrize('name', ALL)
@pytest.mark.parametrize('training', [True, False])
def test_neither_number_nor_content_of_the_padding_matters(name, training):
    norms = {fill: make(name).train(training) for fill in (0.0, 1e3, math.nan, math.inf)}
    for x, g in random_steps(6, (len(LENGTHS), T, C)):
        want = step(norms[0.0], padded(x, 0, 0.0), g)
        for (fill, norm), tokens in zip(list(norms.items())[1:], (27, 3, 1000), strict=True):
            for got, expected in zip(step(norm, padded(x, tokens, fill), g), want, strict=True):
                assert torch.equal(got, expected), fill


@pytest.mark.parametrize('name', ALL)
def test_without_padding_it_is_the_norm_itself(name):
    one, other = make(name), make(name)
    for x, g in random_steps(6, (3, 7, C)):
        x, again = (x.clone().requires_grad_() for _ in range(2))
        want = one(x, hw_shape=(1, 7)) if name == 'DTN' else one(x)
        got = other(again, lengths=[7, 7, 7])
        torch.testing.assert_close(got, want)
        for y in (want, got):
            y.backward(g)
        torch.testing.assert_close(again.grad, x.grad)
        for p, q in zip(one.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)
        for p, q in zip(one.buffers(), other.buffers(), strict=True):
            torch.testing.assert_close(p, q)


@pytest.mark.parametrize('name', [n for n in ALL if not any(True for _ in make(n).buffers())])
def test_norms_of_a_sequence_see_each_sequence_alone(name):
    norm = make(name)
    ((x, _),) = random_steps(1, (len(LENGTHS), T, C))
    y = norm(padded(x, 4, 1e3), lengths=LENGTHS)
    for b, length in enumerate(LENGTHS):
        alone = x[b : b + 1, :length]
        want = norm(alone, hw_shape=(1, length)) if name == 'DTN' else norm(alone)
        torch.testing.assert_close(y[b : b + 1, :length], want)


def test_batch_norm_counts_real_tokens():
    norm, plain = TokenBN(C).double(), nn.BatchNorm1d(C).double()
    ((x, _),) = random_steps(1, (len(LENGTHS), T, C))
    torch.testing.assert_close(norm(padded(x, 9, math.nan), lengths=LENGTHS)[:, :T][REAL], plain(x[REAL]))
    torch.testing.assert_close(norm.bn.running_mean, plain.running_mean)
    torch.testing.assert_close(norm.bn.running_var, plain.running_var)


@pytest.mark.parametrize('ln', ['token', 'image'])
def test_switchable_norm_mixes_statistics_of_real_tokens(ln):
    norm = SN(C, ln=ln).double()
    ((x, _),) = random_steps(1, (len(LENGTHS), T, C))
    y = norm(padded(x, 9, math.nan), lengths=LENGTHS)
    batch_mean, batch_var = x[REAL].mean(0), x[REAL].var(0, correction=0)
    torch.testing.assert_close(norm.running_mean, 0.1 * batch_mean)
    for b, length in enumerate(LENGTHS):
        alone = x[b, :length]
        dims = (-1,) if ln == 'token' else (0, 1)
        means = [alone.mean(0), alone.mean(dims, keepdim=True), batch_mean]
        variances = [alone.var(0, correction=0), alone.var(dims, correction=0, keepdim=True), batch_var]
        want = (alone - sum(means) / 3) / (sum(variances) / 3 + norm.eps).sqrt()
        torch.testing.assert_close(y[b, :length], want)


def dense(norm, x, lengths):
    """DTN in one piece: scores of all pairs of cells, minus infinity where a cell has no real token."""
    s, K = norm.pool_size, norm.num_heads
    real = torch.arange(x.shape[1]) < torch.tensor(lengths)[:, None]
    z = torch.where(real[..., None], x, 0.0).unflatten(-1, (K, -1))
    if norm.settings.prenorm:
        z = z * (z.square().mean(-1, keepdim=True) + norm.eps).rsqrt()
    cells = math.ceil(x.shape[1] / s)
    spare = cells * s - x.shape[1]
    counts = F.pad(real, (0, spare)).unflatten(1, (cells, s)).sum(2)

    def pool(t):
        sums = F.pad(t * real[..., None, None], (0, 0, 0, 0, 0, spare)).unflatten(1, (cells, s)).sum(2)
        return (sums / counts.clamp(min=1)[..., None, None]).permute(0, 2, 1, 3)

    d = torch.arange(cells) - torch.arange(cells)[:, None]
    a = norm.position[:, :, None, None]
    scores = (a[:, 0] * d.square() + a[:, 1] * d).masked_fill(counts[:, None, None] == 0, -math.inf)
    P = scores.softmax(-1)
    mean, square = (P @ pool(t) for t in (z, z.square()))
    cell = torch.arange(x.shape[1]) // s
    M, V = (t[:, :, cell].transpose(1, 2) for t in (mean, square - mean.square()))
    m, v = norm.mean_mix.sigmoid()[:, None], norm.var_mix.sigmoid()[:, None]
    mu = m * z.mean((-2, -1), keepdim=True) + (1 - m) * M
    var = v * z.var((-2, -1), correction=0, keepdim=True) + (1 - v) * V
    return ((z - mu) * (var + norm.eps).rsqrt()).flatten(-2) * norm.weight + norm.bias


@pytest.mark.parametrize('pool_size', [1, 4])
@pytest.mark.parametrize('prenorm', [True, False])
@pytest.mark.parametrize('square', [-1.0, 0.3])
def test_dtn_is_its_dense_form_with_masked_scores(pool_size, prenorm, square):
    lengths = [30, 17, 1, 8, 17]
    norm = make('DTN', pool_size=pool_size, prenorm=prenorm)
    with torch.no_grad():
        norm.position[:, 0] = square
    real = torch.arange(33) < torch.tensor(lengths)[:, None]
    x = torch.randn(5, 33, C, dtype=torch.float64, requires_grad=True)
    got, want = norm(x, lengths=lengths), dense(norm, x, lengths)
    torch.testing.assert_close(got[real], want[real])
    weight = torch.randn_like(got)
    inputs = [x, *norm.parameters()]
    grads = [torch.autograd.grad((y * weight)[real].sum(), inputs) for y in (got, want)]
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other)


def test_dtn_on_a_line_at_its_limits():
    ((x, _),) = random_steps(1, (len(LENGTHS), T, C))
    ln = DTN(C, HEADS, mean_lambda=1, var_lambda=1, prenorm=False).double()
    torch.testing.assert_close(ln(x, lengths=LENGTHS)[REAL], F.layer_norm(x, (C,))[REAL])
    uniform = DTN(C, HEADS, mean_lambda=0, var_lambda=0, prenorm=False, position='uniform').double()
    lengths = [9, 5, 2, 5]
    torch.testing.assert_close(uniform(x, lengths=lengths), TokenIN(C).double()(x, lengths=lengths))


def test_the_start_on_a_line():
    assert line_start(8) == [[-1.0, 2 * centre, 0.0] for centre in (-3.5, -2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 3.5)]
    norm = build_norm(dict(type='DTN'), 16, Place(num_heads=8, position_init='line'))
    assert torch.equal(norm.position, torch.tensor(line_start(8)))
    # Head k looks at the token that is k - 3.5 places on, most of all.
    P = (norm.position[:, 0, None] * (d := torch.arange(-7, 8)) ** 2 + norm.position[:, 1, None] * d).softmax(-1)
    torch.testing.assert_close(P @ d.float(), torch.arange(8) - 3.5, atol=1e-3, rtol=0)


@pytest.mark.parametrize('kind', ['LN', 'DTN', 'IN'])
def test_lengths_may_be_a_tensor_and_half_precision(kind):
    norm = build_norm(dict(type=kind), C, Place(num_heads=HEADS)).float()
    x = torch.randn(4, T, C)
    want = norm(x, lengths=LENGTHS)
    assert torch.equal(norm(x, lengths=torch.tensor(LENGTHS)), want)
    with torch.autocast('cpu', dtype=torch.bfloat16):
        got = norm(x.bfloat16(), lengths=LENGTHS)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.float(), want, rtol=0.02, atol=0.05)


@pytest.mark.parametrize('lengths', [[3, 4], [0, 1, 2], [9, 1, 1], [1.0, 2.0, 3.0], [[1, 2, 3]]])
@pytest.mark.parametrize('norm', [LayerNorm(C), DTN(C), TokenIN(C)])
def test_lengths_that_do_not_fit(norm, lengths):
    with pytest.raises(ValueError, match=r'3 whole numbers from 1 to 8'):
        norm(torch.randn(3, 8, C), lengths=lengths)


def test_lengths_are_for_sequences():
    for norm in (LayerNorm(C), DTN(C), TokenIN(C)):
        with pytest.raises(ValueError, match=r'B x T x C.*2 x 3 x 4 x 12'):
            norm(torch.randn(2, 3, 4, C), lengths=[3, 3])
    with pytest.raises(ValueError, match=r'hw_shape=\(1, 4\)'):
        DTN(C)(torch.randn(2, 4, C), hw_shape=(1, 4), lengths=[4, 3])
    with pytest.raises(TypeError):
        DTN2d(C)(torch.randn(2, C, 3, 4), lengths=[4, 3])
