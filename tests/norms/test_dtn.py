"""What DTN computes: against dense equations, identities, gradients, and other people's LayerNorm and InstanceNorm."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from mmdtn.norms import DTN, DTN2d

from .reference import dense_p, reference_dtn

CHANNELS = {1: 16, 2: 16, 3: 18, 4: 16, 5: 20, 9: 18}  # enough for no token to be nearly without variance


def randomised(layer, scale=0.5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale + (name == 'weight'))
    return layer


@st.composite
def cases(draw):
    heads = draw(st.sampled_from(sorted(CHANNELS)))
    options = dict(
        num_heads=heads,
        pool_size=draw(st.sampled_from([1, 2, 4])),
        prenorm=draw(st.booleans()),
        affine=draw(st.booleans()),
        mean_lambda=draw(st.sampled_from([None, 1.0])),
        # Not 0, which may leave a token no variance at all: 1 / sqrt(eps) would magnify the reference's own rounding.
        var_lambda=draw(st.sampled_from([None, 0.3, 1.0])),
        position=draw(st.sampled_from(['learned', 'learned', 'uniform', 'identity'])),
        unbiased=draw(st.booleans()),
        pool_second_moment=draw(st.booleans()),
    )
    shape = (draw(st.integers(1, 3)), draw(st.integers(1, 11)), draw(st.integers(1, 11)), CHANNELS[heads])
    return options, shape, draw(st.integers(0, 2**31))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(cases())
def test_agrees_with_the_dense_equations(case):
    options, shape, seed = case
    layer = randomised(DTN(shape[-1], **options), seed=seed)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 2 + 0.5
    exact = reference_dtn(x.double(), layer.double())
    torch.testing.assert_close(layer(x.double()), exact, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(layer.float()(x), exact.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@settings(max_examples=40, deadline=None, derandomize=True)
@given(h=st.integers(1, 40), w=st.integers(1, 40), heads=st.sampled_from([1, 4, 9]), seed=st.integers(0, 1000))
def test_large_grids_in_float32(h, w, heads, seed):
    layer = randomised(DTN(CHANNELS[heads], num_heads=heads), seed=seed)
    x = torch.randn(1, h, w, CHANNELS[heads], generator=torch.Generator().manual_seed(seed))
    exact = reference_dtn(x.double(), layer.double()).float()
    torch.testing.assert_close(layer.float()(x), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('pool_size', [1, 2, 4])
def test_lambda_one_is_layernorm(pool_size):
    x = torch.randn(2, 9, 7, 12)
    layer = randomised(DTN(12, 3, pool_size, prenorm=False, mean_lambda=1, var_lambda=1))
    norm = nn.LayerNorm(12)
    norm.load_state_dict({'weight': layer.weight, 'bias': layer.bias})
    torch.testing.assert_close(layer(x), norm(x), rtol=0, atol=1e-5)


@pytest.mark.parametrize('pool_size', [1, 2, 4])
@pytest.mark.parametrize('position', ['uniform', 'learned'])
def test_lambda_zero_and_uniform_p_is_instancenorm(pool_size, position):
    x = torch.randn(2, 12, 8, 12) * 3 + 1
    layer = DTN(12, 3, pool_size, prenorm=False, mean_lambda=0, var_lambda=0, position=position)
    if position == 'learned':
        nn.init.zeros_(layer.position)
    expected = nn.functional.instance_norm(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=1e-5)


def test_without_the_variance_inside_cells_pooled_statistics_are_not_instancenorm():
    x = torch.randn(2, 8, 8, 4)
    layer = DTN(4, 1, 2, prenorm=False, mean_lambda=0, var_lambda=0, position='uniform', pool_second_moment=False)
    pooled = nn.functional.avg_pool2d(x.permute(0, 3, 1, 2), 2)
    mean, var = pooled.mean((2, 3)), pooled.var((2, 3), unbiased=False)
    expected = (x - mean[:, None, None]) / (var[:, None, None] + 1e-5).sqrt()
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=1e-5)


def test_identity_p_leaves_each_token_itself():
    x = torch.randn(2, 5, 6, 8)
    sharp = DTN(8, 2, prenorm=False, mean_lambda=0, var_lambda=0)
    with torch.no_grad():
        sharp.position.copy_(torch.tensor([[-1e4, 0.0, 0.0]] * 2))
    identity = DTN(8, 2, prenorm=False, mean_lambda=0, var_lambda=0, position='identity')
    for layer in (sharp, identity):  # mean is the token, variance 0
        torch.testing.assert_close(layer(x), torch.zeros_like(x), rtol=0, atol=1e-4)


def test_identity_p_with_pooling_is_normalisation_of_each_cell():
    x = torch.randn(2, 6, 4, 8)
    layer = DTN(8, 2, 2, prenorm=False, mean_lambda=0, var_lambda=0, position='identity')
    cells = x.view(2, 3, 2, 2, 2, 8)
    mean, var = cells.mean((2, 4), keepdim=True), cells.var((2, 4), unbiased=False, keepdim=True)
    expected = ((cells - mean) / (var + 1e-5).sqrt()).view_as(x)
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=1e-5)


def test_p_shifts_from_query_to_key():
    """a_2 > 0 looks right and a_3 > 0 looks down, so a mark is seen by the tokens left of it and above it."""
    h, w = 5, 6
    for coefficients, seen_from in (([-1e3, 2e3, 0.0], (2, 2)), ([-1e3, 0.0, 2e3], (1, 3))):
        layer = DTN(2, prenorm=False, mean_lambda=0, var_lambda=1, affine=False)
        with torch.no_grad():
            layer.position.copy_(torch.tensor([coefficients]))
        x = torch.zeros(1, h, w, 2)
        x[0, 2, 3] = torch.tensor([1.0, -1.0])
        moved = layer(x)[0, :, :, 0].abs() > 1e-3  # the mark itself, and where the mark is the neighbourhood's mean
        assert moved.nonzero().tolist() == sorted([[2, 3], list(seen_from)])


@pytest.mark.parametrize('pool_size', [1, 2, 3])
@pytest.mark.parametrize('prenorm', [True, False])
@pytest.mark.parametrize('options', [{}, {'unbiased': True, 'pool_second_moment': False}, {'mean_lambda': 1.0}])
def test_gradients(pool_size, prenorm, options):
    layer = randomised(DTN(6, 3, pool_size, prenorm=prenorm, **options)).double()
    names, parameters = zip(*layer.named_parameters(), strict=True)
    x = torch.randn(2, 4, 5, 6, dtype=torch.float64, requires_grad=True)

    def run(x, *values):
        return torch.func.functional_call(layer, dict(zip(names, values, strict=True)), (x,))

    inputs = (x, *(p.detach().clone().requires_grad_() for p in parameters))
    assert torch.autograd.gradcheck(run, inputs, fast_mode=True)  # along random directions, not entry by entry


def test_gradients_of_a_matrix_sized_grid_agree_with_autograd_through_the_equations():
    layer = randomised(DTN(8, 4, 2), seed=3).double()
    x = torch.randn(2, 17, 22, 8, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn_like(x)
    tensors = [x, *layer.parameters()]
    expected = torch.autograd.grad(reference_dtn(x, layer), tensors, upstream)
    gradients = torch.autograd.grad(layer(x), tensors, upstream)
    for got, want in zip(gradients, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize('options', [{}, {'prenorm': False}, {'pool_second_moment': False}])
@pytest.mark.parametrize('pool_size', [1, 2])
def test_works_in_place_only_on_what_is_its_own(pool_size, options):
    layer = randomised(DTN(8, 4, pool_size, **options))
    x = torch.randn(2, 6, 7, 8, requires_grad=True)
    upstream = torch.randn_like(x)
    before = x.detach().clone(), upstream.clone()
    tensors = [x, *layer.parameters()]
    y = layer(x)
    first, second = (torch.autograd.grad(y, tensors, upstream, retain_graph=True) for _ in range(2))
    assert torch.equal(x, before[0]) and torch.equal(upstream, before[1])
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other), 'a second pass finds what the first did'


STARTS = {
    1: [(0, 0)],
    3: [(0, 0)],
    4: [(-1, -1), (-1, 1), (1, -1), (1, 1)],
    5: [(-1, -1), (-1, 1), (1, -1), (1, 1)],
    9: [(-2, -2), (-2, 0), (-2, 2), (0, -2), (0, 0), (0, 2), (2, -2), (2, 0), (2, 2)],
    12: [(-2, -2), (-2, 0), (-2, 2), (0, -2), (0, 0), (0, 2), (2, -2), (2, 0), (2, 2)],
    16: [
        *((-3, -3), (-3, -1), (-3, 1), (-3, 3), (-1, -3), (-1, -1), (-1, 1), (-1, 3)),
        *((1, -3), (1, -1), (1, 1), (1, 3), (3, -3), (3, -1), (3, 1), (3, 3)),
    ],
}


@pytest.mark.parametrize('heads', STARTS)
def test_local_start(heads):
    start = [[-1, *shift] for shift in STARTS[heads]]
    position = DTN(heads * 2, heads).position.detach()
    assert position[: len(start)].tolist() == start
    rest = position[len(start) :]
    assert (rest.abs() < 0.1).all()
    if len(rest):
        assert rest.unique().numel() == rest.numel(), 'the heads beyond the neighbourhood start at random'


def test_truncated_normal_start_and_lambdas_at_one_half():
    layer = DTN(256, 64, position_init='trunc_normal')
    assert 0.01 < layer.position.std() < 0.03
    assert (layer.mean_mix == 0).all() and (layer.var_mix == 0).all()


def test_parameters_are_2c_plus_5h():
    shapes = {name: tuple(p.shape) for name, p in DTN(64, 4).named_parameters()}
    assert shapes == {'weight': (64,), 'bias': (64,), 'mean_mix': (4,), 'var_mix': (4,), 'position': (4, 3)}


def test_flat_tokens_and_maps_with_channels_first():
    x = torch.randn(2, 5, 7, 12)
    layer = randomised(DTN(12, 3, 2))
    y = layer(x)
    assert torch.equal(layer(x.flatten(1, 2), hw_shape=(5, 7)), y.flatten(1, 2))
    first = DTN2d(12, 3, 2)
    first.load_state_dict(layer.state_dict())
    assert torch.equal(first(x.permute(0, 3, 1, 2).contiguous()), y.permute(0, 3, 1, 2))
    assert torch.equal(layer(x.transpose(1, 2).contiguous().transpose(1, 2)), y), 'any strides'


@pytest.mark.parametrize('number', [1, 5])
@pytest.mark.parametrize(
    'options',
    [
        dict(prenorm=False),
        dict(prenorm=False, affine=False),
        dict(),
        dict(unbiased=True, pool_second_moment=False),
        dict(mean_lambda=1.0, var_lambda=0.0, position='uniform'),
    ],
)
def test_prefix_tokens_are_normalised_as_if_lambdas_were_one(options, number):
    layer = randomised(DTN(12, 3, 2, **options))
    fixed = DTN(12, 3, 2, **dict(options, mean_lambda=1, var_lambda=1))
    fixed.load_state_dict(layer.state_dict(), strict=False)
    x = torch.randn(2, number + 35, 12) * 2 + 1
    y = layer(x, hw_shape=(5, 7), num_prefix_tokens=number)
    assert torch.equal(y[:, number:], layer(x[:, number:], hw_shape=(5, 7))), 'they are not in P'
    for i in range(number):
        torch.testing.assert_close(y[:, i, None, None], fixed(x[:, i, None, None]), rtol=1e-6, atol=1e-6)
    if options == dict(prenorm=False):
        expected = nn.functional.layer_norm(x[:, :number], (12,), layer.weight, layer.bias, layer.settings.eps)
        torch.testing.assert_close(y[:, :number], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize('prenorm', [True, False])
def test_gradients_with_prefix_tokens(prenorm):
    layer = randomised(DTN(6, 3, 2, prenorm=prenorm)).double()
    names, parameters = zip(*layer.named_parameters(), strict=True)
    x = torch.randn(2, 2 + 12, 6, dtype=torch.float64, requires_grad=True)

    def run(x, *values):
        return torch.func.functional_call(layer, dict(zip(names, values, strict=True)), (x, (3, 4), 2))

    assert torch.autograd.gradcheck(run, (x, *(p.detach().clone().requires_grad_() for p in parameters)))


@pytest.mark.parametrize('back_end', ['', 'reference'])
def test_gradients_of_prefix_tokens_are_layernorms(back_end, monkeypatch):
    monkeypatch.setenv('MMDTN_BACKEND', back_end)
    layer, norm = randomised(DTN(12, 3, prenorm=False)), nn.LayerNorm(12)
    norm.load_state_dict({'weight': layer.weight, 'bias': layer.bias})
    x, upstream = torch.randn(2, 1 + 20, 12, requires_grad=True), torch.randn(2, 1, 12)
    got = torch.autograd.grad(layer(x, (4, 5), 1)[:, :1], [x, *layer.parameters()], upstream)
    want = torch.autograd.grad(norm(x)[:, :1], [x, *norm.parameters()], upstream)
    for one, other in zip(got, want, strict=False):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    assert all((grad == 0).all() for grad in got[3:]), 'nothing of it reaches lambdas and P'


def test_dense_p_of_the_reference_is_a_distribution():
    P = dense_p(torch.randn(3, 3), 4, 5)
    torch.testing.assert_close(P.sum(-1), torch.ones(3, 20))
