"""What the normalisers beside DTN compute: against torch's own layers, DTN's special cases, and explicit loops."""

import math
from contextlib import nullcontext
from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mmdtn.norms import (
    DTN,
    SN,
    UN,
    Derf,
    DyT,
    FeatureNorm,
    PowerNorm,
    PRepBN,
    RepBN,
    RMSNorm,
    ScaleNorm,
    TokenBN,
    TokenGN,
    TokenIN,
)

from .helpers import random_steps, run_steps

C = 12
SHAPE = (3, 2, 4, C)


def randomised(norm, seed=0):
    generator = torch.Generator().manual_seed(seed)
    norm = norm.double()
    with torch.no_grad():
        for p in norm.parameters():
            p.add_(0.4 * torch.randn(p.shape, generator=generator, dtype=p.dtype))
    return norm


def agree(got, want, message=''):
    torch.testing.assert_close(
        got, want, rtol=1e-11, atol=1e-11, msg=(lambda m: f'{message}: {m}') if message else None
    )


def with_gradients(formula, norm, x, g):
    """As run_steps gives them, of a formula that autograd differentiates."""
    x = x.clone().requires_grad_()
    y = formula(x)
    return [y.detach(), *torch.autograd.grad(y, [x, *norm.parameters()], g)]


def first(x):
    return x.permute(0, 3, 1, 2).contiguous()


def last(x):
    return x.permute(0, 2, 3, 1)


def centred(x, mean, var, norm):
    return (x - mean) / (var + norm.eps).sqrt() * norm.weight + norm.bias


FORMULAS = [
    (TokenIN(C), lambda n, x: last(F.instance_norm(first(x), weight=n.weight, bias=n.bias))),
    (
        TokenIN(C, eps=1e-2, unbiased=True),
        lambda n, x: centred(x, x.mean((1, 2), keepdim=True), x.var((1, 2), keepdim=True, correction=1), n),
    ),
    (TokenGN(C, num_groups=3), lambda n, x: last(F.group_norm(first(x), 3, n.weight, n.bias, n.eps))),
    (RMSNorm(C), lambda n, x: x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * n.weight),
    (ScaleNorm(C), lambda n, x: n.weight * x / x.square().sum(-1, keepdim=True).sqrt().clamp(min=n.eps)),
    (ScaleNorm(C, eps=4.0), lambda n, x: n.weight * x / x.square().sum(-1, keepdim=True).sqrt().clamp(min=4)),
    (ScaleNorm(C, per_channel=False), lambda n, x: n.weight[0] * x / x.square().sum(-1, keepdim=True).sqrt()),
    (DyT(C), lambda n, x: n.weight * torch.tanh(n.alpha * x) + n.bias),
    (Derf(C), lambda n, x: n.weight * torch.erf(n.alpha * x + n.shift) + n.bias),
    (
        TokenBN(C),
        lambda n, x: last(F.batch_norm(first(x), None, None, n.bn.weight, n.bn.bias, True)),
    ),
    (
        RepBN(C),
        lambda n, x: last(F.batch_norm(first(x), None, None, n.bn.weight, n.bn.bias, True)) + n.eta * x,
    ),
]


@pytest.mark.parametrize(('norm', 'formula'), FORMULAS, ids=[repr(n).partition('\n')[0] for n, _ in FORMULAS])
def test_is_its_formula_and_torchs_own_layer(norm, formula):
    norm = randomised(norm)
    ((x, g),) = random_steps(1, SHAPE)
    want = with_gradients(lambda x: formula(norm, x), norm, x, g)
    for got, expected in zip(run_steps(norm, [(x, g)]), want, strict=True):
        agree(got, expected)


def test_starts():
    for norm in (TokenIN(4), TokenGN(4), DyT(4), Derf(4), SN(4), PowerNorm(4), UN(4), FeatureNorm(4), TokenBN(4).bn):
        assert torch.equal(norm.weight, torch.ones(4)) and torch.equal(norm.bias, torch.zeros(4))
    assert torch.equal(ScaleNorm(4).weight, torch.full((4,), 2.0))
    assert torch.equal(ScaleNorm(4, per_channel=False).weight, torch.full((1,), 2.0))
    assert torch.equal(RMSNorm(4).weight, torch.ones(4))
    assert (DyT(4).alpha, Derf(4).alpha, Derf(4).shift, RepBN(4).eta) == (0.5, 0.5, 0, 1)
    assert torch.equal(FeatureNorm(4, num_heads=2).mix, torch.tensor([[2.0, 0, 0]] * 2))
    sizes = dict(
        SN=2 * 12 + 6,
        PowerNorm=24,
        UN=24,
        DyT=25,
        Derf=26,
        RepBN=25,
        PRepBN=49,
        ScaleNorm=12,
        RMSNorm=12,
        FeatureNorm=27,
    )
    for kind in (SN, PowerNorm, UN, DyT, Derf, RepBN, PRepBN, ScaleNorm, RMSNorm, FeatureNorm):
        assert sum(p.numel() for p in kind(12).parameters()) == sizes[kind.__name__]


def test_bn_is_torchs_batch_norm_over_many_steps():
    ours, theirs = TokenBN(C).double(), nn.BatchNorm2d(C).double()
    for x, _ in random_steps(5, SHAPE):
        agree(ours(x), last(theirs(first(x))))
    for ours_buffer, theirs_buffer in zip(ours.buffers(), theirs.buffers(), strict=True):
        agree(ours_buffer, theirs_buffer)
    agree(ours.eval()(x), last(theirs.eval()(first(x))))


def test_in_is_dtn_with_a_uniform_p_alone():
    ((x, _),) = random_steps(1, SHAPE)
    dtn = DTN(C, position='uniform', mean_lambda=0.0, var_lambda=0.0, prenorm=False).double()
    agree(TokenIN(C).double()(x), dtn(x))


def test_in_of_a_single_token_is_its_bias():
    norm = randomised(TokenIN(C))
    agree(norm(torch.randn(2, 1, 1, C, dtype=torch.double)), norm.bias.detach().expand(2, 1, 1, C))
    for kind in (TokenIN, SN):
        with pytest.raises(ValueError, match='one token'):
            kind(C, unbiased=True)(torch.randn(2, 1, 1, C))


def test_sn_without_the_batch_is_dtn_with_a_uniform_p():
    norm = randomised(SN(C, batch=False))
    w, v = norm.mean_weight.softmax(0), norm.var_weight.softmax(0)
    dtn = DTN(C, position='uniform', mean_lambda=w[1].item(), var_lambda=v[1].item(), prenorm=False).double()
    dtn.load_state_dict(dict(weight=norm.weight, bias=norm.bias))
    ((x, _),) = random_steps(1, SHAPE)
    agree(norm(x), dtn(x))


@pytest.mark.parametrize('unbiased', [False, True])
@pytest.mark.parametrize('ln', ['token', 'image'])
def test_sn_is_its_formula(ln, unbiased):
    """Over steps that move the running statistics, and in evaluation. SN's code pools the unbiased variance."""
    norm = randomised(SN(C, ln=ln, unbiased=unbiased))
    running = torch.zeros(C, dtype=torch.double), torch.ones(C, dtype=torch.double)
    w, v = norm.mean_weight.softmax(0), norm.var_weight.softmax(0)

    def formula(x, of_batch=None):
        mean = x.mean((1, 2), keepdim=True)
        var = x.var((1, 2), keepdim=True, correction=int(unbiased))
        second = var + mean**2
        if ln == 'token':
            ln_mean, ln_var = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, correction=0)
        else:
            ln_mean = mean.mean(-1, keepdim=True)
            ln_var = second.mean(-1, keepdim=True) - ln_mean**2
        nonlocal running
        if of_batch is None:
            of_batch = mean.mean(0), second.mean(0) - mean.mean(0) ** 2
            running = [0.9 * old + 0.1 * new.detach().flatten() for old, new in zip(running, of_batch, strict=True)]
        mu = w[0] * mean + w[1] * ln_mean + w[2] * of_batch[0]
        variance = v[0] * var + v[1] * ln_var + v[2] * of_batch[1]
        return centred(x, mu, variance, norm)

    for x, g in random_steps(3, SHAPE):
        want = with_gradients(formula, norm, x, g)
        w, v = norm.mean_weight.softmax(0), norm.var_weight.softmax(0)  # the graph of the last ones is gone
        for got, expected in zip(run_steps(norm, [(x, g)]), want, strict=True):
            agree(got, expected)
    agree(norm.running_mean, running[0])
    agree(norm.running_var, running[1])
    agree(norm.eval()(x), formula(x, running))


def test_scalenorm_is_rmsnorm_up_to_its_scale():
    scale, rms = randomised(ScaleNorm(C, eps=0.0)), RMSNorm(C, eps=0.0).double()
    rms.load_state_dict(dict(weight=scale.weight / math.sqrt(C)))
    ((x, _),) = random_steps(1, SHAPE)
    agree(scale(x), rms(x))


def test_prepbn_goes_from_layernorm_to_repbn():
    norm = randomised(PRepBN(C, taper_iters=4))
    ln, rep = nn.LayerNorm(C, eps=1e-6).double(), RepBN(C).double()
    ln.load_state_dict(norm.ln.state_dict())
    rep.load_state_dict({k: v for k, v in norm.state_dict().items() if k in rep.state_dict()})
    x, _ = random_steps(1, SHAPE)[0]
    for rho in (1, 0.75, 0.5, 0.25, 0, 0):
        with pytest.raises(RuntimeError, match='has made') if rho else nullcontext():
            norm.as_affine()
        agree(norm.eval()(x), rho * ln(x) + (1 - rho) * rep.eval()(x), 'evaluation takes rho as it is')
        agree(norm.train()(x), rho * ln(x) + (1 - rho) * rep.train()(x))
    assert norm.count == 6


AFFINE = [
    TokenBN(C),
    RepBN(C),
    PRepBN(C, taper_iters=2),
    UN(C, warmup_iters=4),
    FeatureNorm(C, num_heads=3),
    FeatureNorm(C, taper_iters=2),
]


@pytest.mark.parametrize('norm', AFFINE, ids=lambda n: type(n).__name__)
def test_affine_in_evaluation(norm):
    norm = randomised(norm)
    run_steps(norm, steps := random_steps(8, SHAPE))
    a, b = norm.as_affine()
    x = steps[0][0]
    agree(norm.eval()(x), a * x + b)


# PowerNorm


def power_steps(norm, steps, q):
    """Section 3 of the paper in the order of its code, for ``N x C`` tokens: as run_steps gives it."""
    phi, nu = torch.ones(C, dtype=torch.double), torch.zeros(C, dtype=torch.double)
    results = []
    for t, (x, g) in enumerate(steps, start=1):
        x, g = x.reshape(-1, C), g.reshape(-1, C)
        leaf = x.clone().requires_grad_()
        groups = leaf.reshape(-1, norm.num_groups, C // norm.num_groups)
        u = (groups / (groups.pow(2).mean(2, keepdim=True) + norm.eps).sqrt()).reshape(-1, C)
        of_batch = u.detach().pow(2).mean(0)
        z = u.detach() / ((of_batch if t <= norm.warmup_iters else phi) + norm.eps).sqrt()
        y = norm.weight * z + norm.bias
        if t < norm.warmup_iters:
            phi = phi * (t - 1) / t + of_batch / t
        phi = 0.9 * phi + 0.1 * of_batch
        d = g * norm.weight - 0.1 * nu * z
        below = phi if q == 'running' and t >= norm.warmup_iters else of_batch
        nu = nu + (d * z).mean(0)
        (to_x,) = torch.autograd.grad(u, leaf, d / (below + norm.eps).sqrt())
        shape = steps[0][0].shape
        results += [y.reshape(shape), to_x.reshape(shape), (g * z).sum(0), g.sum(0)]
    return results, dict(phi=phi, nu=nu)


@pytest.mark.parametrize('q', ['running', 'batch'])
def test_powernorm_is_an_explicit_loop_through_the_end_of_its_warm_up(q):
    norm = randomised(PowerNorm(C, num_groups=3, warmup_iters=7, q=q))
    steps = random_steps(20, SHAPE)
    want, state = power_steps(norm, steps, q)
    for i, (got, expected) in enumerate(zip(run_steps(norm, steps), want, strict=True)):
        agree(got, expected.detach(), f'step {i // 4 + 1}')
    for key, value in state.items():
        agree(norm.get_buffer(key), value.detach(), key)
    x = steps[0][0]
    groups = x.unflatten(-1, (3, 4))
    u = (groups / (groups.square().mean(-1, keepdim=True) + norm.eps).sqrt()).flatten(-2)
    agree(norm.eval()(x), norm.weight * u / (norm.phi + norm.eps).sqrt() + norm.bias)


def test_powernorm_starts_with_the_root_mean_square_of_the_batch():
    ((x, _),) = random_steps(1, SHAPE)
    y = PowerNorm(C, num_groups=C, eps=0.0).double()(x)
    agree(y, x.sign())
    y = PowerNorm(C, eps=0.0).double()(x)
    agree(y.square().mean((0, 1, 2)), torch.ones(C, dtype=torch.double))


def test_gradient_of_powernorm_is_that_of_its_forward_pass_where_averages_stand_still():
    norm = randomised(PowerNorm(4, num_groups=2, alpha_fwd=1.0, alpha_bwd=1.0, warmup_iters=0))
    norm.phi.copy_(torch.tensor([0.3, 1.2, 2.0, 0.7]))
    x = torch.randn(2, 3, 4, dtype=torch.double, requires_grad=True)
    parameters = dict(norm.named_parameters())

    def run(x, *values):
        return torch.func.functional_call(norm, dict(zip(parameters, values, strict=True)), (x,))

    assert torch.autograd.gradcheck(run, (x, *parameters.values()))


# Unified Normalization


def un_steps(norm, steps):
    """The published order, with Python's own branches and windows as lists: as run_steps gives it."""
    M, Mg, m, eps = norm.window, norm.grad_window, norm.momentum, norm.eps
    zero = torch.zeros(C, dtype=torch.double)
    phi, psi, skipped = zero + 1, zero, 0
    window, grad_window, results = [zero] * M, [zero] * Mg, []
    for t, (x, g) in enumerate(steps, start=1):
        x, g = x.reshape(-1, C), g.reshape(-1, C)
        v = x.pow(2).mean(0)
        recorded = torch.stack(window).sqrt().flatten()
        V = (recorded - recorded.mean()).pow(2).sum() / (len(recorded) - 1)
        window[t % M] = v
        skip = M == 1
        if norm.outlier_filter and t >= norm.warmup_iters:
            arithmetic, geometric = sum(window) / M, torch.stack(window).log().mean(0).exp()
            if ((arithmetic - geometric) > M * V).any():
                skip, window[t % M] = True, phi
                skipped += 1
        own = t <= M or t < norm.warmup_iters or skip
        s = v if own else torch.stack(window).prod(0) ** (1 / M)
        r = ((s + eps) / (phi + eps)).sqrt().clamp(0.2, 5)
        if t <= max(1000, norm.warmup_iters) or skip:
            r = torch.ones_like(r)
        phi = m * phi + (1 - m) * s
        z = x / (s + eps).sqrt()
        y = norm.weight * z + norm.bias

        h = g * norm.weight * r
        a = (h * z).mean(0)
        grad_window[t % Mg] = psi if skip else a
        k = a if t <= Mg or t < norm.warmup_iters or skip else sum(grad_window) / Mg
        psi = m * psi + (1 - m) * k
        to_x = (h - z * (k if skip else psi)) / (s + eps).sqrt()
        shape = steps[0][0].shape
        results += [y.reshape(shape), to_x.reshape(shape), (g * r * z).sum(0), g.sum(0)]
    state = dict(phi=phi, psi=psi, squares=torch.stack(window), grads=torch.stack(grad_window))
    return results, {k: v.detach() for k, v in state.items()}, skipped


@pytest.mark.parametrize(('window', 'grad_window'), [(2, 2), (4, 4), (4, 3), (2, 5)])
@pytest.mark.parametrize('outlier_filter', [True, False])
def test_un_is_an_explicit_loop(window, grad_window, outlier_filter):
    norm = randomised(UN(C, window=window, grad_window=grad_window, warmup_iters=6, outlier_filter=outlier_filter))
    spread = torch.linspace(0.1, 3, C, dtype=torch.double)  # without it, most batches are outliers
    steps = [(x * spread * (20 if t in (6, 17, 30) else 1), g) for t, (x, g) in enumerate(random_steps(50, SHAPE), 1)]
    want, state, skipped = un_steps(norm, steps)
    assert skipped in ({4: [3], 2: range(3, 45)}[window] if outlier_filter else [0]), 'outliers and others, both'
    for i, (got, expected) in enumerate(zip(run_steps(norm, steps), want, strict=True)):
        agree(got, expected.detach(), f'step {i // 4 + 1}')
    for key, value in state.items():
        agree(norm.get_buffer(key), value, key)
    assert norm.skipped == skipped and norm.count == 50
    x = steps[0][0]
    agree(norm.eval()(x), norm.weight * x / (norm.phi + norm.eps).sqrt() + norm.bias)


def test_un_compensates_for_its_windows_after_a_thousand_steps():
    """From step 1001 on r is not 1 any more; it has a bound on either side."""
    norm = randomised(UN(C, warmup_iters=4, momentum=0.99, outlier_filter=False))
    steps = random_steps(1, SHAPE) * 1000
    scales = [1, 40, 40, 40, 40, *[0.01] * 7]
    steps += [(x * scale, g) for (x, g), scale in zip(random_steps(12, SHAPE), scales, strict=True)]
    want, _, _ = un_steps(norm, steps)
    for got, expected in zip(run_steps(norm, steps), want, strict=True):
        agree(got, expected.detach())


def test_un_filters_an_outlier_and_says_so():
    """Channels so different that V is large, so that only a batch of another scale is an outlier."""
    scale = torch.linspace(0.1, 3, C, dtype=torch.double)
    norm = UN(C, warmup_iters=6).double()
    steps = [
        (torch.randn(SHAPE, dtype=torch.double) * scale * (100 if t == 9 else 1), torch.ones(SHAPE))
        for t in range(1, 13)
    ]
    for t, step in enumerate(steps, start=1):
        phi = norm.phi.clone()
        y = run_steps(norm, [step])[0]
        assert norm.skipped == int(t >= 9), t
        if t == 9:
            agree(norm.squares[9 % 4], phi, 'phi takes the place of the outlier in the window')
            own = step[0].square().mean((0, 1, 2))
            agree(y, step[0] / (own + norm.eps).sqrt())
            agree(norm.phi, 0.9 * phi + 0.1 * own, 'but it enters phi')


def test_un_with_a_window_of_one_is_a_function_of_its_batch():
    """Then autograd knows its gradient: the second opinion on the backward pass."""
    norm = randomised(UN(C, window=1, grad_window=1, warmup_iters=2, outlier_filter=False))
    steps = random_steps(6, SHAPE)

    def formula(x):
        return norm.weight * x / (x.square().mean((0, 1, 2)) + norm.eps).sqrt() + norm.bias

    got = run_steps(norm, steps)
    for i, (x, g) in enumerate(steps):
        for a, b in zip(got[4 * i : 4 * i + 4], with_gradients(formula, norm, x, g), strict=True):
            agree(a, b)


@pytest.mark.parametrize('norm', [PowerNorm(C, num_groups=3, warmup_iters=3), UN(C, warmup_iters=4)])
def test_backward_passes_may_follow_several_forward_passes(norm):
    """The gradient is of the statistics that its own forward pass used, not of those that the next one left."""
    norm = randomised(norm)
    run_steps(norm, random_steps(7, SHAPE))
    (x1, g1), (x2, g2) = random_steps(2, SHAPE, seed=1)
    apart = deepcopy(norm)
    x1, x2 = x1.requires_grad_(), x2.requires_grad_()
    y1, y2 = norm(x1), norm(x2)
    y1.backward(g1)
    want = run_steps(apart, [(x1.detach(), g1)])
    agree(y1.detach(), want[0])
    agree(x1.grad, want[1])
    y2.backward(g2)
    agree(x2.grad, run_steps(apart, [(x2.detach(), g2)])[1])
