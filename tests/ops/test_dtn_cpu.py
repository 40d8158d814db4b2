"""The C++ of CPUs against the definition in float64."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import settings as run
from hypothesis import strategies as st

from mmdtn.ops import Settings, Tensors, dtn, dtn_cpu, reference

from .settings import in_float64, random_tensors, relative_error, results, settings

# Heads and their channels: fewer than a vector has, as many, some more. Of very few in all there may be no variance.
HEADS = {1: (16, 37, 64), 2: (8, 16, 33), 3: (7, 16, 18), 4: (5, 16, 20), 5: (4, 64), 9: (3, 48), 12: (2, 32)}


@st.composite
def problems(draw, largest=40):
    heads = draw(st.sampled_from(sorted(HEADS)))
    channels = heads * draw(st.sampled_from(HEADS[heads]))
    side = st.integers(1, largest)
    return (
        (draw(st.integers(1, 3)), draw(side), draw(side), channels),
        heads,
        draw(settings()),
        draw(st.integers(0, 999)),
    )


def check(shape, heads, s, seed, change=lambda x: x):
    assert dtn_cpu.works()
    (x, *parameters), upstream = random_tensors(shape, heads, seed)
    exact = results(reference.dtn, in_float64([x, *parameters]), upstream, s)
    found = results(dtn, [change(x.detach()).requires_grad_(), *parameters], upstream, s)
    for name, value in found.items():
        if exact[name].norm() > 1e-9:  # the gradient of an identical or a 1 x 1 neighbourhood is zero
            assert relative_error(value, exact[name]) < (1e-5 if name == 'y' else 1e-4), name


@run(max_examples=120, deadline=None, derandomize=True)
@given(problems())
def test_agrees_with_the_reference(problem):
    check(*problem)


@pytest.mark.parametrize('pool_size', [1, 4])
@pytest.mark.parametrize('shape', [(1, 150, 97, 24), (1, 1, 301, 24), (2, 70, 64, 48)])
def test_large_grids(shape, pool_size):
    check(shape, 3, Settings(pool_size), 0)


@pytest.mark.parametrize('position', [[-0.02, 0, 0], [0.3, 0.1, -2], [-1, 40, -40], [-300, 0, 0], [5, 0, 0]])
@pytest.mark.parametrize('pool_size', [1, 2])
def test_heads_that_look_anywhere(position, pool_size):
    """Everywhere, into far corners, far to a side, at themselves: kernels of all widths."""
    tensors, upstream = random_tensors((1, 33, 29, 16), 1)
    with torch.no_grad():
        tensors[-1].copy_(torch.tensor([position], dtype=torch.float))
    s = Settings(pool_size)
    exact = results(reference.dtn, in_float64(tensors), upstream, s)
    for name, value in results(dtn, tensors, upstream, s).items():
        if exact[name].norm() > 1e-6:
            assert relative_error(value, exact[name]) < (1e-5 if name == 'y' else 1e-4), name


@pytest.mark.parametrize('pool_size', [1, 2])
def test_memory_in_any_order(pool_size):
    for change in (
        lambda x: x.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1),
        lambda x: x.repeat_interleave(2, 0)[::2],
        lambda x: x.repeat(1, 1, 1, 2)[..., : x.shape[-1]],
    ):
        check((2, 9, 7, 36), 3, Settings(pool_size), 0, change)


@pytest.mark.parametrize('pool_size', [1, 2, 4])
@pytest.mark.parametrize('prenorm', [True, False])
def test_exact_at_a_large_offset(prenorm, pool_size):
    """As exact as LayerNorm is there, where E[x^2] - E[x]^2 would keep no digit."""
    s = Settings(pool_size, prenorm=prenorm)
    (x, *parameters), upstream = random_tensors((2, 20, 24, 64), 4)
    x = (x.detach() + 1e3).requires_grad_()
    exact = results(reference.dtn, in_float64([x, *parameters]), upstream, s)
    found = results(dtn, [x, *parameters], upstream, s)

    def layer_norm(x, weight, bias):
        y = F.layer_norm(x, x.shape[-1:], weight, bias)
        return y, torch.autograd.grad(y, x, upstream.to(y.dtype))[0]

    of_layer_norm = layer_norm(x, *parameters[:2])
    exact_layer_norm = layer_norm(*in_float64([x, *parameters[:2]]))
    for name, (theirs, truth) in zip('yx', zip(of_layer_norm, exact_layer_norm, strict=True), strict=True):
        assert relative_error(found[name], exact[name]) <= 3 * relative_error(theirs, truth), name
    assert all(value.isfinite().all() for value in found.values())


@pytest.mark.parametrize('dtype', [torch.half, torch.bfloat16])
def test_half_precision_is_that_of_the_tensors_not_of_the_statistics(dtype):
    (x, *parameters), upstream = random_tensors((2, 9, 8, 24), 3)
    x = (x.detach() + 20).to(dtype).requires_grad_()
    exact = results(reference.dtn, in_float64([x, *parameters]), upstream.to(dtype), Settings(2))
    found = results(dtn, [x, *parameters], upstream, Settings(2))
    assert found['y'].dtype == found['x'].dtype == dtype
    for name, value in found.items():
        assert relative_error(value, exact[name]) < (torch.finfo(dtype).eps if name in 'yx' else 1e-4), name


@pytest.mark.parametrize('pool_size', [1, 2])
def test_same_bits_for_any_number_of_threads(pool_size):
    tensors, upstream = random_tensors((3, 14, 13, 48), 3)
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.append(results(dtn, tensors, upstream, Settings(pool_size)))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(value, found[0][name]) for name, value in other.items())


def test_a_token_that_is_not_finite_spoils_its_own_image_and_no_other():
    tensors, _ = random_tensors((2, 9, 8, 16), 2)
    with torch.no_grad():
        tensors[0][0, 3, 3, 5] = float('nan')
    y = dtn(Tensors(*tensors), Settings(2))
    assert y[0, 3, 3].isnan().all() and y[1].isfinite().all()


def test_batches_without_images():
    tensors, upstream = random_tensors((0, 9, 8, 16), 2)
    found = results(dtn, tensors, upstream, Settings(2))
    assert found['y'].shape == found['x'].shape == (0, 9, 8, 16) and (found['weight'] == 0).all()
