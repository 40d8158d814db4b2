"""FeatureNorm: its formula written plainly, the norms that it can be, its collapse, and batches that are none."""

import pytest
import torch
from torch import nn

from mmdtn.norms import FeatureNorm, RepBN

from .helpers import random_steps, run_steps

C, HEADS = 12, 3
SHAPE = (3, 2, 4, C)


def randomised(norm, seed=0):
    generator = torch.Generator().manual_seed(seed)
    norm = norm.double()
    with torch.no_grad():
        for p in norm.parameters():
            p.add_(0.8 * torch.randn(p.shape, generator=generator, dtype=p.dtype))
    return norm


def agree(got, want, tolerance=1e-11):
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def plainly(norm, x, low, high):
    """The formula, channel by channel."""
    eps, columns = norm.eps, []
    for c in range(C):
        share = norm.mix[c // (C // HEADS)].softmax(0)
        v, minimum, maximum = x[..., c], low[c], high[c]
        z = (v - v.mean()) / (v.var(correction=0) + eps).sqrt()
        f = 2 * (v - minimum) / (maximum - minimum + eps) - 1
        columns.append(norm.weight[c] * (share[0] * z + share[1] * f + share[2] * v) + norm.bias[c])
    return torch.stack(columns, -1)


def ends(x):
    x = x.detach().reshape(-1, C)
    return x.min(0).values, x.max(0).values


def test_training_is_the_formula_with_minimum_and_maximum_held():
    """In values and in all gradients; running statistics as they are said to move."""
    norm = randomised(FeatureNorm(C, num_heads=HEADS))
    assert (norm.weight < 0).any()
    low = high = None
    for x, g in random_steps(4, SHAPE):
        leaf = x.clone().requires_grad_()
        want = plainly(norm, leaf, *ends(x))
        gradients = torch.autograd.grad(want, [leaf, *norm.parameters()], g)
        for got, expected in zip(run_steps(norm, [(x, g)]), [want.detach(), *gradients], strict=True):
            agree(got, expected)
        new = ends(x)
        low, high = new if low is None else (0.9 * low + 0.1 * new[0], 0.9 * high + 0.1 * new[1])
        agree(norm.running_min, low)
        agree(norm.running_max, high)


def test_gradcheck_with_minimum_and_maximum_held():
    norm = randomised(FeatureNorm(4, num_heads=2))
    x = torch.randn(2, 3, 4, dtype=torch.double)
    # Rows that are the extremes of every channel, so that no step of gradcheck moves them.
    fixed = torch.tensor([[-9.0], [9.0]], dtype=torch.double).expand(2, 4)[None]
    parameters = dict(norm.named_parameters())

    def run(inner, *values):
        x = torch.cat((inner.flatten(0, 1)[None], fixed), 1)
        return torch.func.functional_call(norm, dict(zip(parameters, values, strict=True)), (x,))

    assert torch.autograd.gradcheck(run, (x.requires_grad_(), *parameters.values()))


def test_zscore_alone_is_torchs_batch_norm():
    ours, theirs = randomised(FeatureNorm(C, branches=('zscore',))), nn.BatchNorm1d(C).double()
    theirs.load_state_dict(dict(weight=ours.weight, bias=ours.bias), strict=False)
    steps = random_steps(5, SHAPE)
    flat = [tuple(t.reshape(-1, C) for t in step) for step in steps]
    for i, (got, want) in enumerate(zip(run_steps(ours, steps), _without_mix(theirs, flat), strict=True)):
        if want is not None:
            agree(got.reshape(want.shape), want)
        else:
            assert i % 5 == 4 and not got.any(), 'the share of a single branch is fixed'
    agree(ours.running_mean, theirs.running_mean)
    agree(ours.running_var, theirs.running_var)
    assert ours.count == theirs.num_batches_tracked
    x = flat[0][0]
    agree(ours.eval()(x), theirs.eval()(x))


def _without_mix(norm, steps):
    found = run_steps(norm, steps)
    return [r for i in range(0, len(found), 4) for r in (*found[i : i + 4], None)]


def test_minmax_alone_lies_between_minus_one_and_one():
    norm = FeatureNorm(C, branches=('minmax',)).double()
    for x, _ in random_steps(3, SHAPE):
        y = norm(x).reshape(-1, C)
        assert y.min() >= -1 and y.max() <= 1
        agree(y.min(0).values, -torch.ones(C, dtype=torch.double))
        agree(y.max(0).values, torch.ones(C, dtype=torch.double), 1e-3)  # eps in the range


def test_zscore_and_identity_are_repbn():
    rep = RepBN(C).double()
    with torch.no_grad():
        rep.bn.weight.fill_(1.7)
        rep.bn.bias.normal_()
        rep.eta.fill_(0.4)
    ours = FeatureNorm(C, branches=('zscore', 'identity')).double()
    with torch.no_grad():
        ours.weight.fill_(1.7 + 0.4)
        ours.bias.copy_(rep.bn.bias)
        ours.mix.copy_(torch.tensor([[1.7, 0.4]], dtype=torch.double).log())  # softmax: 1.7 / 2.1 and 0.4 / 2.1
    for x, g in random_steps(5, SHAPE):
        for got, want in zip(run_steps(ours, [(x, g)])[:2], run_steps(rep, [(x, g)])[:2], strict=True):
            agree(got, want)
    agree(ours.eval()(x), rep.eval()(x))
    for got, want in zip(ours.as_affine(), rep.as_affine(), strict=True):
        agree(got, want)


def trained(dtype=torch.double, **options):
    norm = randomised(FeatureNorm(C, num_heads=HEADS, **options)).to(dtype)
    run_steps(norm, steps := random_steps(20, SHAPE))
    assert (norm.weight < 0).any()
    return norm.eval(), steps[0][0].to(dtype)


def test_collapses_into_one_affine_map():
    """Against the running statistics put into the branches, not against the layer's own evaluation alone."""
    norm, x = trained()
    a, b = norm.as_affine()
    share = norm.mix.softmax(-1).repeat_interleave(C // HEADS, 0)
    z = (x - norm.running_mean) / (norm.running_var + norm.eps).sqrt()
    f = 2 * (x - norm.running_min) / (norm.running_max - norm.running_min + norm.eps) - 1
    want = norm.weight * (share[:, 0] * z + share[:, 1] * f + share[:, 2] * x) + norm.bias
    agree(a * x + b, want, 1e-12)
    agree(norm(x), want, 1e-12)


def test_collapses_into_the_linear_layer_behind_it():
    norm, x = trained(torch.float)
    linear = nn.Linear(C, 7)
    a, b = norm.as_affine()
    fused = nn.functional.linear(x, linear.weight * a, linear.bias + linear.weight @ b)
    agree(fused, linear(norm(x)), 1e-5)


def test_tapers_from_layernorm():
    norm = randomised(FeatureNorm(C, num_heads=HEADS, taper_iters=4))
    ln = nn.LayerNorm(C, eps=1e-6).double()
    ln.load_state_dict(norm.ln.state_dict())
    alone = FeatureNorm(C, num_heads=HEADS).double()
    alone.load_state_dict({k: v for k, v in norm.state_dict().items() if k in alone.state_dict()})
    ((x, _),) = random_steps(1, SHAPE)
    for rho in (1, 0.75, 0.5, 0.25, 0, 0):
        if rho:
            with pytest.raises(RuntimeError, match=r'FeatureNorm .* taper_iters=4'):
                norm.as_affine()
        agree(norm.eval()(x), rho * ln(x) + (1 - rho) * alone.eval()(x))
        agree(norm.train()(x), rho * ln(x) + (1 - rho) * alone.train()(x))
    a, b = norm.as_affine()
    agree(norm.eval()(x), a * x + b)


def test_a_constant_channel_has_no_spread():
    """Far from zero, too, where digits would be lost."""
    for branch, value in (('zscore', 0.0), ('minmax', -1.0)):
        norm = FeatureNorm(C, branches=(branch,))
        x = torch.randn(SHAPE)
        x[..., 5] = 37.0
        x.requires_grad_()
        y = norm(x)
        torch.testing.assert_close(y[..., 5], torch.full(SHAPE[:-1], value), rtol=0, atol=1e-5)
        y.square().sum().backward()
        assert x.grad.isfinite().all()


@pytest.mark.parametrize('bad', [float('inf'), float('nan')])
def test_a_batch_that_is_not_finite_leaves_no_trace(bad):
    norm, x = trained()
    before = {key: value.clone() for key, value in norm.named_buffers()}
    x[0, 0, 0, 0] = bad
    norm.train()(x)
    for key, value in norm.named_buffers():
        assert torch.equal(value, before[key]), key


def test_one_token_is_no_batch():
    norm = FeatureNorm(C)
    with pytest.raises(ValueError, match=r'one token.*1 x 1 x 1 x 12'):
        norm(torch.randn(1, 1, 1, C))
    assert norm.eval()(torch.randn(1, 1, 1, C)).isfinite().all()
