"""Every normaliser beside DTN, as a citizen of torch and MM: the next one is tested by being registered.

What each computes is in test_normalisers_formulas.py.
"""

import copy
import io
import pickle

import pytest
import torch
from mmengine.optim import build_optim_wrapper
from mmengine.registry import MODELS
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import mmdtn.norms
from mmdtn.backbones import PVTDTN, SwinDTN, ViTDTN
from mmdtn.norms import BatchStatisticsNorm, MovingAverageNorm, Place, TokenNorm, build_norm

from .helpers import in_two_processes, random_steps, run_steps

C = 12
NORMS = sorted(
    name for name, found in MODELS.module_dict.items() if isinstance(found, type) and issubclass(found, TokenNorm)
)
# So short that a few steps of a test leave them behind.
SHORT = dict(PowerNorm=dict(warmup_iters=4), UN=dict(warmup_iters=4), PRepBN=dict(taper_iters=5))


def make(name, **options):
    norm = build_norm(dict(type=name) | SHORT.get(name, {}) | options, C, Place(num_heads=3))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in norm.parameters():
            p.add_(0.3 * torch.randn(p.shape, generator=generator))
    return norm


def test_all_are_exported():
    assert {*NORMS} == {
        name for name in mmdtn.norms.__all__ if name in MODELS.module_dict and not name.startswith('DTN')
    }
    assert len(NORMS) >= 12


@pytest.mark.parametrize('name', NORMS)
@pytest.mark.parametrize('shape', [(2, 5, 7, C), (3, 7, C), (2, 1, 10, C), (2, 1, 1, C), (1, 1, 3, C)])
def test_any_shape_in_training_and_evaluation(name, shape):
    norm = make(name)
    for mode in (True, False):
        x = torch.randn(shape, requires_grad=True)
        before = x.detach().clone()
        y = norm.train(mode)(x)
        assert y.shape == x.shape and y.dtype == x.dtype and y.is_contiguous()
        norm.zero_grad()
        y.square().sum().backward()
        assert torch.equal(x, before)
        assert x.grad.isfinite().all() and all(
            p.grad is not None and p.grad.isfinite().all() for p in norm.parameters()
        )


@pytest.mark.parametrize('name', NORMS)
def test_tokens_may_lie_anyhow_in_memory_and_have_any_grid(name):
    x = torch.randn(2, 4, 6, C)
    norm = make(name).eval()
    want = norm(x)
    torch.testing.assert_close(norm(x.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1)), want)
    torch.testing.assert_close(norm(x.flatten(1, 2)), want.flatten(1, 2))


@pytest.mark.parametrize('name', NORMS)
@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_half_precision_differs_by_its_rounding_alone(name, dtype):
    """In, under autocast, and as a model; statistics in float32, the output in the dtype of the input."""
    x = (torch.randn(4, 5, 5, C) * 2).to(dtype)
    for mode in (True, False):
        want = make(name).train(mode)(x.float())
        with torch.autocast('cpu', dtype=dtype):
            y = make(name).train(mode)(x)
        half = make(name).to(dtype).train(mode)(x)
        for got in (y, half):
            assert got.dtype == dtype
            torch.testing.assert_close(got.float(), want, rtol=0.02, atol=0.05)


@pytest.mark.parametrize('name', NORMS)
def test_training_step_under_autocast(name):
    model = nn.Sequential(nn.Linear(C, C), make(name), nn.Linear(C, C))
    for _ in range(3):
        with torch.autocast('cpu', dtype=torch.bfloat16):
            loss = model(torch.randn(2, 3, 4, C)).square().mean()
        loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    assert {b.dtype for b in model.buffers()} <= {torch.float32, torch.int64}


@pytest.mark.parametrize('name', NORMS)
def test_resumes_exactly(name):
    """Whatever the step: running statistics, windows and counters are in the state, and nothing else is needed."""
    one, other = make(name), make(name)
    steps = random_steps(10, (2, 3, 4, C), dtype=torch.float32)
    run_steps(one, steps[:5])
    saved = io.BytesIO()
    torch.save(one.state_dict(), saved)
    saved.seek(0)
    other.load_state_dict(torch.load(saved, weights_only=True))
    copied = copy.deepcopy(one)
    unpickled = pickle.loads(pickle.dumps(one))
    want = run_steps(one, steps[5:])
    for again in (other, copied, unpickled):
        for got, expected in zip(run_steps(again, steps[5:]), want, strict=True):
            assert torch.equal(got, expected)
        for key, value in again.state_dict().items():
            assert torch.equal(value, one.state_dict()[key]), key


@pytest.mark.parametrize('name', NORMS)
def test_repr_makes_the_layer_again(name):
    kind = getattr(mmdtn.norms, name)
    for norm in (kind(C), make(name, eps=1e-3)):
        again = eval(f'kind({norm.extra_repr()})')
        assert repr(again) == repr(norm)
    assert kind(C).extra_repr() == '12'
    assert 'eps=0.001' in norm.extra_repr()


@pytest.mark.parametrize('name', NORMS)
def test_mixes_no_device_and_waits_for_nothing(name):
    """No number leaves a tensor on its way. Autograd wants a real GPU for fake tensors, but none for meta tensors."""
    with FakeTensorMode(), torch.device('cuda'):
        norm = build_norm(dict(type=name), C)
        for mode in (True, False):
            y = norm.train(mode)(torch.randn(2, 3, 4, C))
            assert y.device.type == 'cuda' and y.shape == (2, 3, 4, C)
    norm = make(name).to('meta')
    for mode in (True, False):
        x = torch.empty(2, 3, 4, C, device='meta', requires_grad=True)
        norm.train(mode)(x).sum().backward()
        assert x.grad.shape == x.shape and all(p.grad is not None for p in norm.parameters())


@pytest.mark.parametrize('name', NORMS)
def test_compiled_model_computes_the_same(name):
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(C, C), make(name), nn.Linear(C, C))
    eager = copy.deepcopy(model)
    compiled = torch.compile(model, backend='aot_eager')
    for _ in range(2):
        x = torch.randn(2, 3, 4, C)
        for run in (eager, compiled):
            run(x).square().sum().backward()
        for (key, p), q in zip(model.named_parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, msg=key)
    for key, value in model.state_dict().items():
        torch.testing.assert_close(value, eager.state_dict()[key], msg=key)
    model.eval(), eager.eval()
    whole = torch.compile(model, backend='aot_eager', fullgraph=True)
    torch.testing.assert_close(whole(x), eager(x))


BACKBONES = dict(
    vit=lambda **o: ViTDTN(
        arch=dict(width=24, depth=2, num_heads=3, mlp_ratio=1), dtn_layers=2, img_size=16, patch_size=4, **o
    ),
    pvt=lambda **o: PVTDTN(
        dict(base='tiny', depths=(1,) * 4, widths=(8, 16, 40, 64), mlp_ratios=(1,) * 4),
        dtn_stages=(0, 1, 2, 3),
        out_type='cls_token',
        img_size=32,
        **o,
    ),
    swin=lambda **o: SwinDTN(dict(base='tiny', width=24, depths=(1, 2, 1, 1)), window_size=2, **o),
)


@pytest.mark.parametrize('backbone', BACKBONES)
@pytest.mark.parametrize('name', NORMS)
def test_trains_in_every_backbone(name, backbone):
    """In all blocks, the class token among the tokens from the start; activations kept or computed again."""
    norm_cfg = dict(type=name)
    model = BACKBONES[backbone](norm_cfg=norm_cfg, drop_path_rate=0.0)
    model.init_weights()
    norms = {n for n, m in model.named_modules() if isinstance(m, TokenNorm)}
    assert norms == {f'{n}.norm{i}' for n, m in model.named_modules() if hasattr(m, 'mlp') for i in (1, 2)}
    x = torch.randn(3, 3, 40, 56)
    sum(out.square().sum() for out in model(x)).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())

    wrapper = dict(optimizer=dict(type='SGD', lr=1e-3, weight_decay=0.1))
    wrapper = build_optim_wrapper(
        model, wrapper | dict(paramwise_cfg=dict(custom_keys=dict(norm=dict(decay_mult=0.0))))
    )
    decayed = {id(p) for g in wrapper.optimizer.param_groups for p in g['params'] if g['weight_decay']}
    for n, p in model.named_parameters():
        assert (id(p) in decayed) == ('norm' not in n), n
    wrapper.step()

    if not all(m.repeatable for m in model.modules() if isinstance(m, TokenNorm)):
        with pytest.raises(ValueError, match=f'with_cp=True.*{name}'):
            BACKBONES[backbone](norm_cfg=norm_cfg, with_cp=True)
        return
    again = BACKBONES[backbone](norm_cfg=norm_cfg, drop_path_rate=0.0, with_cp=True)
    again.load_state_dict(model.state_dict())
    for m in (model, again):
        m.zero_grad()
        sum(out.square().sum() for out in m(x)).backward()
    for p, q in zip(model.parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def test_heads_and_placement_of_dtn_are_there_for_the_asking():
    """As docs/normalisers.md has it. Without asking, PVT has its published heads, and a class token joins at once."""
    heads = [dict(base='tiny', num_heads=(4, 4, 5, 8)), 'tiny']
    pvt, published = (PVTDTN(arch, norm_cfg=dict(type='GN')) for arch in heads)
    for model, want in ((pvt, [4, 4, 5, 8]), (published, [1, 2, 5, 8])):
        blocks = [stage.blocks[0] for stage in model.stages]
        assert [b.attn.num_heads for b in blocks] == want
        assert [b.norm1.num_groups for b in blocks[:3]] == want[:3] and isinstance(blocks[3].norm1, nn.LayerNorm)
    arch = dict(width=24, depth=4, num_heads=3, mlp_ratio=1)
    assert ViTDTN(arch, norm_cfg=dict(type='GN'), dtn_layers=4).cls_from == 0
    assert ViTDTN(arch, norm_cfg=dict(type='GN'), dtn_layers=3, cls_from=3).cls_from == 3


@pytest.mark.parametrize('name', NORMS)
def test_norm_eval_freezes_what_batches_taught(name):
    model = BACKBONES['vit'](norm_cfg=dict(type=name), norm_eval=True).train()
    before = copy.deepcopy(dict(model.named_buffers()))
    model(torch.randn(3, 3, 16, 16))[0].sum().backward()
    for key, value in model.named_buffers():
        assert torch.equal(value, before[key]), key
    norms = [m for m in model.modules() if isinstance(m, TokenNorm)]
    assert all(m.training != isinstance(m, BatchStatisticsNorm) for m in norms)
    if any(True for _ in norms[0].buffers()):
        assert isinstance(norms[0], BatchStatisticsNorm), 'what has buffers has to have a base class that freezes it'


def test_pretrained_weights_start_a_new_warm_up(tmp_path):
    for norm in (n for n in NORMS if issubclass(getattr(mmdtn.norms, n), MovingAverageNorm)):
        options = dict(norm_cfg=dict(type=norm, warmup_iters=4))
        model = BACKBONES['vit'](**options)
        for _ in range(3):
            model(torch.randn(2, 3, 16, 16))[0].sum().backward()
        torch.save(dict(state_dict=model.state_dict()), tmp_path / 'trained.pth')
        new = BACKBONES['vit'](**options, init_cfg=dict(type='Pretrained', checkpoint=str(tmp_path / 'trained.pth')))
        new.init_weights()
        for key, value in new.state_dict().items():
            want = model.state_dict()[key]
            assert torch.equal(value, torch.zeros_like(want) if key.endswith('count') else want), key


@pytest.mark.parametrize('name', NORMS)
@pytest.mark.parametrize('scope', ['mmengine', 'mmcv', 'mmdet', 'mmpretrain'])
def test_builds_from_a_norm_cfg_in_every_scope(scope, name):
    if scope == 'mmcv':
        from mmcv.cnn import build_norm_layer

        norm = build_norm_layer(dict(type=name), C)[1]
    elif scope == 'mmpretrain':
        from mmpretrain.models.utils import build_norm_layer

        norm = build_norm_layer(dict(type=name, eps=1e-3), C)
    elif scope == 'mmdet':
        from mmdet.registry import MODELS as registry

        norm = registry.build(dict(type=name, num_features=C))
    else:
        norm = MODELS.build(dict(type=name, num_features=C, eps=1e-3))
    assert type(norm) is getattr(mmdtn.norms, name)
    assert norm(torch.randn(2, 3, 4, C)).shape == (2, 3, 4, C)


@pytest.mark.parametrize('name', NORMS)
def test_errors_name_what_came_and_what_is_wanted(name):
    norm = make(name)
    with pytest.raises(ValueError, match=rf'{name} takes 12 channels.*2 x 12 x 5 x 5.*permute'):
        norm(torch.randn(2, C, 5, 5))
    with pytest.raises(ValueError, match=r'torch\.int64'):
        norm(torch.zeros(2, 5, 5, C, dtype=torch.long))
    for wrong in (0, 1.5, True):
        with pytest.raises(ValueError, match=f'num_features={wrong}'):
            type(norm)(wrong)


@pytest.mark.parametrize(
    ('cfg', 'words'),
    [
        (dict(type='TokenGN', num_groups=5), 'num_groups=5 does not divide'),
        (dict(type='PowerNorm', num_groups=0), 'num_groups=0 does not divide'),
        (dict(type='PowerNorm', q='phi'), "q='phi'.*running.*batch"),
        (dict(type='SN', ln='layer'), "ln='layer'.*token.*image"),
        (dict(type='UN', warmup_iters=3), 'warmup_iters=3.*window=4'),
        (dict(type='UN', grad_window=0), 'grad_window=0'),
        (dict(type='PRepBN', taper_iters=0), 'taper_iters=0.*RepBN'),
        (dict(type='FeatureNorm', num_heads=5), 'num_heads=5 does not divide'),
        (dict(type='FeatureNorm', branches=('zscore', 'mean')), "branches=.*mean.*'minmax'"),
        (dict(type='FeatureNorm', branches=()), 'branches=.*zscore'),
        (dict(type='FeatureNorm', taper_iters=-1), 'taper_iters=-1'),
    ],
)
def test_options_that_make_no_layer(cfg, words):
    with pytest.raises(ValueError, match=words):
        build_norm(cfg, C)


@pytest.mark.parametrize('short', ['BN', 'IN', 'GN'])
def test_short_names_are_this_packages_whatever_mm_has_registered(short):
    import mmcv.cnn  # noqa: F401  # registers channels-first classes under these names

    norm = build_norm(dict(type=short), C, Place(num_heads=3))
    assert type(norm) is getattr(mmdtn.norms, f'Token{short}')
    assert getattr(norm, 'num_groups', 3) == 3
    for refused in (f'mmengine.{short}', MODELS.get(short)):
        with pytest.raises(ValueError, match=f"takes B x C x H x W.*'{short}'"):
            build_norm(dict(type=refused), C)


@pytest.mark.parametrize('name', ['TokenBN', 'RepBN', 'PRepBN'])
def test_mmengines_sync_bn_keeps_the_layer(name):
    from mmengine.model import convert_sync_batchnorm

    model = nn.Sequential(make(name))
    x = torch.randn(2, 3, 4, C)
    want = model.eval()(x)
    model = convert_sync_batchnorm(model, 'torch').eval()
    assert any(isinstance(m, nn.SyncBatchNorm) for m in model.modules())
    torch.testing.assert_close(model(x), want)


@pytest.mark.parametrize('name', [n for n in NORMS if issubclass(getattr(mmdtn.norms, n), MovingAverageNorm)])
def test_an_overflowing_gradient_leaves_the_averages_as_they_are(name):
    norm = make(name)
    run_steps(norm, random_steps(7, (2, 3, 4, C)))
    before = copy.deepcopy(norm)
    y = norm(torch.randn(2, 3, 4, C, requires_grad=True))
    upstream = torch.ones_like(y)
    upstream[0, 0, 0, 0] = float('inf')
    y.backward(upstream)
    forward = {'count', 'phi', 'squares', 'skipped'}
    for key, value in norm.named_buffers():
        assert value.isfinite().all()
        assert key in forward or torch.equal(value, before.get_buffer(key)), key


@pytest.mark.slow
def test_two_processes_compute_what_one_does():
    """Seven steps, past the warm-up, of five images: three in one process and two in the other."""
    norms = {n: make(n).double() for n in NORMS if hasattr(make(n), 'sync')}
    assert {*norms} >= {'SN', 'PowerNorm', 'UN', 'FeatureNorm'}
    steps = random_steps(7, (5, 3, 4, C))
    halves = [[[t[part] for t in step] for step in steps] for part in (slice(0, 3), slice(3, 5))]
    found = in_two_processes(norms, halves)
    for n, norm in norms.items():
        want = run_steps(norm, steps)
        (first, first_state), (second, second_state) = (process[n] for process in found)
        per_step = 2 + len(list(norm.parameters()))
        for i, (a, b, whole) in enumerate(zip(first, second, want, strict=True)):
            # Outputs and gradients of inputs lie side by side, gradients of parameters add up.
            both = torch.cat((a, b)) if i % per_step < 2 else a + b
            torch.testing.assert_close(both, whole, rtol=1e-9, atol=1e-9, msg=f'{n}, {i}')
        for key, value in norm.state_dict().items():
            for state in (first_state, second_state):
                torch.testing.assert_close(state[key], value, rtol=1e-9, atol=1e-9, msg=f'{n}, {key}')
