"""DTN as a citizen of torch: devices, dtypes, autocast, memory, the compiler, and errors for people."""

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch._inductor.utils import fresh_cache, run_and_get_code
from torch._subclasses.fake_tensor import FakeTensorMode

from mmdtn.analysis import SavedBytes
from mmdtn.norms import DTN, DTN2d, autograd

from .reference import reference_dtn
from .test_dtn import FORMS, computed_by, randomised


def saved_bytes(layer, x):
    with SavedBytes(layer) as saved:
        _out = layer(x)
    return saved.total


@pytest.mark.parametrize('pool_size', [1, 2, 4])
@pytest.mark.parametrize('how', ['eager', *(pytest.param(how, marks=pytest.mark.slow) for how in ('region', 'whole'))])
def test_keeps_at_most_twice_the_input(pool_size, how):
    torch._dynamo.reset()
    x = torch.randn(2, 28, 28, 64, requires_grad=True)
    layer = DTN(64, 4, pool_size, compiled=how == 'region')
    if how == 'whole':
        layer = torch.compile(layer, fullgraph=True)
        layer(x)  # what is kept while compiling is not what a step keeps
    assert saved_bytes(layer, x) <= 2 * x.numel() * 4


def test_keeps_little_more_than_a_layernorm():
    x = torch.randn(2, 28, 28, 384, requires_grad=True)
    assert saved_bytes(DTN(384, 6), x) <= 1.1 * saved_bytes(nn.LayerNorm(384), x)


def test_never_builds_p_over_all_pairs_of_tokens():
    x = torch.randn(1, 24, 24, 8, requires_grad=True)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for t in torch.utils._pytree.tree_leaves(out):
                largest = max(largest, t.numel() if isinstance(t, torch.Tensor) else 0)
            return out

    with Watch():
        DTN(8, 2)(x).sum().backward()
    assert largest < 24**4 / 20


def test_double_backward_says_that_it_is_not_there():
    x = torch.randn(1, 3, 3, 4, requires_grad=True)
    (grad,) = torch.autograd.grad(DTN(4)(x).pow(2).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match='once_differentiable'):
        grad.sum().backward()


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
@pytest.mark.parametrize('form', ['eager', 'blocks'])
def test_autocast_keeps_statistics_in_float32(form, dtype):
    """A large mean and a tiny variance: in half precision E[x^2] - E[x]^2 is noise."""
    torch.manual_seed(0)
    for prenorm in (True, False):
        layer = randomised(DTN(16, 4, 2, prenorm=prenorm), scale=0.1)
        x = (1e3 + 0.5 * torch.randn(2, 8, 8, 16)).requires_grad_()
        exact = reference_dtn(x.detach().double(), copy.deepcopy(layer).double())
        with torch.autocast('cpu', dtype=dtype), computed_by(form):
            y = layer(x)
            assert y.dtype == nn.LayerNorm(16)(x).dtype
            y.square().sum().backward()
        assert y.isfinite().all() and x.grad.isfinite().all()
        error = (y.double() - exact).norm() / exact.norm()
        assert error < 0.02, error


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
@pytest.mark.parametrize('form', ['eager', 'blocks'])
def test_half_input_under_autocast_and_half_models(form, dtype):
    layer = randomised(DTN(16, 4, 2), scale=0.1)
    x = torch.randn(2, 8, 8, 16).to(dtype)
    exact = reference_dtn(x.double(), copy.deepcopy(layer).double())
    with torch.autocast('cpu', dtype=dtype), computed_by(form):
        assert layer(x).dtype == nn.LayerNorm(16)(x).dtype == dtype
        torch.testing.assert_close(layer(x), exact.to(dtype), rtol=1e-2, atol=1e-2)
    half = copy.deepcopy(layer).to(dtype)
    with computed_by(form):
        assert half(x).dtype == dtype
        torch.testing.assert_close(half(x), exact.to(dtype), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize('form', FORMS)
def test_variance_is_never_negative(form):
    """Around equal tokens it is the rounding of E[x^2] - E[x]^2, and what would be added to it here is less."""
    noise = torch.full((1, 6, 6, 8), 1234.5) + torch.randn(1, 6, 6, 8) * 1e-4
    halves = torch.linspace(0.5, 1.7, 8) * torch.tensor([1.0, -1.0]).repeat_interleave(16)[:, None].expand(1, 20, -1, 1)
    for x, prenorm in ((noise, True), (noise, False), (halves, False)):
        layer = DTN(8, 2, prenorm=prenorm, var_lambda=0.0, mean_lambda=0.0, eps=1e-12)
        with computed_by(form):
            assert layer(x).isfinite().all()


def test_forward_on_fake_cuda_tensors_mixes_no_device_and_waits_for_nothing():
    with FakeTensorMode(), torch.device('cuda'):
        layer = DTN(12, 3, 2)
        for h, w in ((9, 14), (6, 4)):
            y = layer(torch.randn(2, h, w, 12))
            assert y.device.type == 'cuda' and y.shape == (2, h, w, 12)
        assert DTN(12, 3, mean_lambda=0.5, var_lambda=0.5, position='uniform', affine=False)(y).device.type == 'cuda'
        assert DTN2d(12, 3, position='identity')(torch.randn(2, 12, 5, 5)).device.type == 'cuda'


def test_moving_copying_saving():
    layer = randomised(DTN(12, 3, 2))
    x = torch.randn(2, 5, 6, 12)
    y = layer(x)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(other(x), y)
    fresh = DTN(12, 3, 2)
    fresh.load_state_dict(layer.state_dict())
    assert torch.equal(fresh(x), y)
    torch.testing.assert_close(layer.double()(x.double()).float(), y)
    assert layer.float()(x).dtype == torch.float32
    assert layer.to('meta')(x.to('meta')).shape == x.shape


@pytest.mark.parametrize('pool_size', [1, pytest.param(2, marks=pytest.mark.slow)])
def test_whole_layer_compiles_to_one_graph_with_a_bounded_number_of_variants(pool_size):
    torch._dynamo.reset()
    layer = randomised(DTN(12, 3, pool_size))
    counter = CompileCounter()
    compiled = torch.compile(layer, backend=counter, fullgraph=True)
    torch.testing.assert_close(compiled(torch.randn(2, 5, 6, 12)), compiled(torch.randn(2, 5, 6, 12)), atol=99, rtol=0)
    for h in range(3, 13):
        for w in (4, 7, 9, 12):
            x = torch.randn(2, h, w, 12)
            torch.testing.assert_close(compiled(x), layer(x))
    few = counter.frame_count
    for h in range(13, 30):
        compiled(torch.randn(2, h, h + 5, 12))
    assert counter.frame_count == few <= 7


@pytest.mark.slow
@pytest.mark.filterwarnings('error:DTN runs uncompiled')
@pytest.mark.parametrize('pool_size', [1, 2])
@pytest.mark.parametrize('how', ['region', 'whole'])
@pytest.mark.parametrize('large_side', [1, 10**6])  # P by operators, by blocks
def test_inductor_gives_the_same_numbers(pool_size, how, large_side, monkeypatch):
    monkeypatch.setattr(autograd, 'LARGE_SIDE', large_side)
    torch._dynamo.reset()
    # Of some inputs float32 leaves gradients three digits, compiled or not; in float64 a difference is a mistake.
    layer = randomised(DTN(12, 3, pool_size)).double()
    if how == 'region':
        compiled = randomised(DTN(12, 3, pool_size, compiled=True)).double()
        grids = [(6, 8), (8, 10), (31, 6), (1, 9), (5, 8), (12, 1)]
    else:
        compiled, grids = torch.compile(layer, fullgraph=True), [(6, 8)]
    for h, w in grids:
        x = torch.randn(2, h, w, 12, dtype=torch.float64)
        upstream = torch.randn_like(x)
        results = []
        for module in (layer, compiled):
            module.zero_grad()
            inputs = x.clone().requires_grad_()
            y = module(inputs)
            y.backward(upstream)
            results.append([y, inputs.grad, *(p.grad.clone() for p in module.parameters())])
        for got, want in zip(*results, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
def test_a_region_compiled_with_one_thread_uses_all_that_a_later_process_has():
    autograd._region.cache_clear()
    with fresh_cache(), torch.no_grad():
        assert torch.get_num_threads() == 1
        _, (code,) = run_and_get_code(DTN(12, 3, 2, compiled=True), torch.randn(2, 40, 40, 12))
    assert '#pragma omp parallel' in code and 'num_threads(1)' not in code


def test_region_falls_back_to_eager_with_one_warning(monkeypatch):
    def no_compiler(*_, **__):
        raise OSError('no compiler at hand')

    monkeypatch.setattr(autograd._Region, 'works', True)
    monkeypatch.setattr(torch, 'compile', lambda run, options: no_compiler)
    autograd._region.cache_clear()
    layer, eager = (randomised(DTN(12, 3, compiled=compiled)) for compiled in (True, False))
    x = torch.randn(2, 4, 4, 12, requires_grad=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        assert torch.equal(layer(x), eager(x))
        layer(x).sum().backward()
    autograd._region.cache_clear()
    assert len(caught) == 1 and 'no compiler at hand' in str(caught[0].message)


def test_export_and_trace(tmp_path, monkeypatch):
    monkeypatch.setattr(autograd, 'LARGE_SIDE', 1)  # even so no operator of this package is in what was exported
    layer = randomised(DTN(12, 3, 2))
    x = torch.randn(2, 6, 7, 12)
    model = nn.Sequential(nn.Linear(12, 12), layer).eval()
    exported = torch.export.export(model, (x,))
    assert 'mmdtn' not in str(exported.graph)
    torch.testing.assert_close(exported.module()(x), model(x))
    with warnings.catch_warnings():
        warnings.simplefilter('ignore', torch.jit.TracerWarning)
        torch.jit.trace(layer, x).save(tmp_path / 'traced.pt')
    traced = torch.jit.load(tmp_path / 'traced.pt')
    torch.testing.assert_close(traced(x), layer(x))


@pytest.mark.parametrize('scope', ['mmengine', 'mmcv', 'mmpretrain', 'mmdet'])
@pytest.mark.parametrize('name', ['DTN', 'DTN2d'])
def test_builds_from_a_norm_cfg_in_every_scope(scope, name):
    cfg = dict(type=name, num_heads=4, pool_size=2)
    if scope == 'mmcv':
        from mmcv.cnn import build_norm_layer

        layer = build_norm_layer(cfg, 64)[1]
    elif scope == 'mmpretrain':
        from mmpretrain.models.utils import build_norm_layer

        layer = build_norm_layer(cfg, 64)
    else:
        import mmdet.registry
        import mmengine.registry

        registry = {'mmengine': mmengine.registry, 'mmdet': mmdet.registry}[scope].MODELS
        layer = registry.build(dict(num_features=64, **cfg))
    assert type(layer).__name__ == name and (layer.num_features, layer.num_heads, layer.pool_size) == (64, 4, 2)


@pytest.mark.parametrize(
    ('options', 'words'),
    [
        (dict(num_features=10, num_heads=4), r'num_heads=4 does not divide num_features=10.*\[1, 2, 5, 10\]'),
        (dict(num_features=8, pool_size=0), 'pool_size=0'),
        (dict(num_features=8, pool_size=1.5), r'pool_size=1\.5'),
        (dict(num_features=8, num_heads=0), 'num_heads=0'),
        (dict(num_features=0), 'num_features=0'),
        (dict(num_features=8, mean_lambda=1.5), r'mean_lambda=1\.5.*from 0 to 1'),
        (dict(num_features=8, mean_lambda=0.5, mix_mean=False), 'contradicts'),
        (dict(num_features=8, position='none'), "position='none'.*learned.*uniform.*identity"),
        (dict(num_features=8, position_init='zeros'), "position_init='zeros'.*local.*trunc_normal"),
        (dict(num_features=1, unbiased=True), 'unbiased'),
    ],
)
def test_arguments_that_make_no_layer(options, words):
    with pytest.raises(ValueError, match=words):
        DTN(**options)


@pytest.mark.parametrize(
    ('shape', 'hw_shape', 'words'),
    [
        ((2, 197, 8), (14, 14), '197.*class token'),
        ((2, 196, 8), None, 'hw_shape'),
        ((2, 196, 8), (14, 13), 'has 182 tokens, but got 196'),
        ((2, 4, 4, 7), None, '8 channels.*2 x 4 x 4 x 7'),
        ((2, 8, 4, 4), None, 'DTN2d'),
        ((4, 8), None, '4 x 8'),
        ((2, 4, 4, 8), (2, 8), 'contradicts'),
        ((2, 0, 4, 8), None, 'no tokens.*2 x 0 x 4 x 8'),
    ],
)
def test_input_that_fits_no_grid(shape, hw_shape, words):
    with pytest.raises(ValueError, match=words):
        DTN(8, 2)(torch.randn(shape), hw_shape)


def test_input_that_is_not_floating_and_maps_for_dtn2d():
    with pytest.raises(ValueError, match=r'torch\.int64'):
        DTN(8)(torch.zeros(1, 2, 2, 8, dtype=torch.long))
    with pytest.raises(ValueError, match='B x C x H x W'):
        DTN2d(8)(torch.zeros(1, 4, 8))
    with pytest.raises(ValueError, match='B x 8 x H x W'):
        DTN2d(8)(torch.zeros(1, 4, 4, 8))


def test_repr_names_what_differs_from_the_defaults():
    assert repr(DTN(64)) == 'DTN(64)'
    assert repr(DTN(64, 4, eps=1e-6, prenorm=False)) == 'DTN(64, num_heads=4, eps=1e-06, prenorm=False)'
    assert repr(DTN2d(64, position='uniform')) == "DTN2d(64, position='uniform')"
