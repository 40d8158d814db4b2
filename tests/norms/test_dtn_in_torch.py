"""DTN as a layer among others: copies, dtypes, registries, and errors for people. As an operator: tests/ops."""

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode

from mmdtn.norms import DTN, DTN2d

from .test_dtn import randomised


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_models_in_half_precision(dtype):
    layer = randomised(DTN(16, 4, 2), scale=0.1)
    x = torch.randn(2, 8, 8, 16).to(dtype)
    y = copy.deepcopy(layer).to(dtype)(x)
    assert y.dtype == dtype
    torch.testing.assert_close(y, layer(x.float()).to(dtype), rtol=2e-2, atol=2e-2)


def test_variance_is_never_negative():
    """Around equal tokens it is the rounding of E[x^2] - E[x]^2, and what would be added to it here is less."""
    noise = torch.full((1, 6, 6, 8), 1234.5) + torch.randn(1, 6, 6, 8) * 1e-4
    halves = torch.linspace(0.5, 1.7, 8) * torch.tensor([1.0, -1.0]).repeat_interleave(16)[:, None].expand(1, 20, -1, 1)
    for x, prenorm in ((noise, True), (noise, False), (halves, False)):
        layer = DTN(8, 2, prenorm=prenorm, var_lambda=0.0, mean_lambda=0.0, eps=1e-12)
        assert layer(x).isfinite().all() and layer.double()(x.double()).isfinite().all()


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


def test_traces(tmp_path):
    layer, x = randomised(DTN(12, 3, 2)), torch.randn(2, 6, 7, 12)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore', torch.jit.TracerWarning)
        torch.jit.trace(layer, x).save(tmp_path / 'traced.pt')
    torch.testing.assert_close(torch.jit.load(tmp_path / 'traced.pt')(x), layer(x))


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
        ((2, 197, 8), (14, 14), '196 tokens, but got 197 .*num_prefix_tokens=1'),
        ((2, 196, 8), None, 'hw_shape'),
        ((2, 196, 8), (14, 13), 'has 182 tokens, but got 196'),
        ((2, 4, 4, 7), None, '8 channels.*2 x 4 x 4 x 7'),
        ((2, 8, 4, 4), None, 'DTN2d'),
        ((4, 8), None, '4 x 8'),
        ((2, 4, 4, 8), (2, 8), r'hw_shape=\(2, 8\)'),
        ((2, 0, 4, 8), None, '2 x 0 x 4 x 8'),
    ],
)
def test_input_that_fits_no_grid(shape, hw_shape, words):
    with pytest.raises(ValueError, match=words):
        DTN(8, 2)(torch.randn(shape), hw_shape)


@pytest.mark.parametrize(
    ('shape', 'hw_shape', 'number', 'words'),
    [
        ((2, 197, 8), (14, 14), 2, '196 tokens, and there are 2 in front of them, but got 197.*num_prefix_tokens=1'),
        ((2, 195, 8), (14, 14), 1, 'but got 195 in 2 x 195 x 8.$'),
        ((2, 196, 8), (7, 7), 0, 'has 49 tokens, but got 196 in 2 x 196 x 8.$'),
        ((2, 196, 8), (14, 14), -1, 'num_prefix_tokens=-1 '),
        ((2, 5, 7, 8), None, 1, 'num_prefix_tokens=1 is only for flat tokens .*2 x 5 x 7 x 8'),
    ],
)
def test_prefix_tokens_that_do_not_fit(shape, hw_shape, number, words):
    with pytest.raises(ValueError, match=words):
        DTN(8, 2)(torch.randn(shape), hw_shape, number)


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_prefix_tokens_under_autocast_and_as_fake_tensors(dtype):
    layer, x = randomised(DTN(16, 4, 2)), torch.randn(2, 1 + 20, 16)
    plain = layer(x, (4, 5), 1)
    with torch.autocast('cpu', dtype=torch.bfloat16):
        y = layer(x.to(dtype), (4, 5), 1)
    assert y.dtype == dtype
    torch.testing.assert_close(y.float(), plain, rtol=2e-2, atol=2e-2 if dtype == torch.bfloat16 else 1e-6)
    with FakeTensorMode(), torch.device('cuda'):
        y = DTN(16, 4, 2)(torch.randn(2, 21, 16, dtype=dtype), (4, 5), 1)
        assert (y.device.type, y.shape, y.dtype) == ('cuda', (2, 21, 16), dtype)


class AroundAGrid(nn.Module):
    """Tokens of a map behind a class token, as a model makes them."""

    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 12))
        self.norm = randomised(DTN(12, 3, 2))

    def forward(self, image):
        tokens = torch.cat((self.token.expand(len(image), -1, -1), image.flatten(1, 2)), 1)
        return self.norm(tokens, image.shape[1:3], 1)


def test_prefix_tokens_compile_to_one_graph_for_all_sizes():
    torch._dynamo.reset()
    model, counter = AroundAGrid(), CompileCounter()
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for height, width in ((5, 6), (8, 7), (9, 12)):
        x = torch.randn(2, height, width, 12)
        torch.testing.assert_close(compiled(x), model(x))
    assert counter.frame_count == 2, 'one graph for the first size, one for all others'


@pytest.mark.slow
def test_prefix_tokens_export_with_open_sizes():
    model, (height, width) = AroundAGrid(), (torch.export.Dim(name, min=4, max=64) for name in ('height', 'width'))
    program = torch.export.export(
        model, (torch.randn(2, 5, 6, 12),), dynamic_shapes=({1: height, 2: width},), strict=False
    )
    assert 'mmdtn' not in str(program.graph)
    x = torch.randn(2, 9, 4, 12)
    torch.testing.assert_close(program.module()(x), model(x), rtol=1e-5, atol=1e-5)


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
