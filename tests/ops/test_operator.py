"""The operator as a citizen of torch: compilers, autocast, fake tensors, what it keeps, and where no back end is."""

import functools
import os
import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from mmdtn.analysis import SavedBytes
from mmdtn.norms import DTN
from mmdtn.ops import Settings, Tensors, dtn, reference

from .settings import in_float64, random_tensors, relative_error, results


@pytest.mark.parametrize('dtype', [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize('s', [Settings(), Settings(pool_size=2, prenorm=False)])
def test_is_a_well_behaved_operator(s, dtype):
    (x, *parameters), _ = random_tensors((2, 5, 6, 8), 2)
    x = x.detach().to(dtype).requires_grad_()
    parameters = in_float64(parameters) if dtype == torch.float64 else parameters
    torch.library.opcheck(torch.ops.mmdtn.dtn.default, (x, *parameters, dtype, *s))
    y, kept = torch.ops.mmdtn.dtn(x, *parameters, dtype, *s)
    arguments = (y.detach(), x.detach(), *(p.detach() for p in parameters), kept, *s)
    if (
        dtype != torch.float64
    ):  # there the reference differentiates by torch.func, whose tensors opcheck cannot look into
        torch.library.opcheck(torch.ops.mmdtn.dtn_backward.default, arguments)


@pytest.mark.parametrize('pool_size', [1, 2])
def test_a_compiled_model_is_one_graph_for_all_sizes(pool_size):
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(12, 12), DTN(12, 3, pool_size))
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for height, width in ((5, 6), (8, 7), (9, 12), (31, 4)):
        x = torch.randn(2, height, width, 12)
        torch.testing.assert_close(compiled(x), model(x))
    assert counter.frame_count == 2, 'one graph for the first size, one for all others'


@pytest.mark.slow
@pytest.mark.parametrize('pool_size', [1, 2])
def test_inductor_gives_the_same_gradients_and_keeps_no_more(pool_size):
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(12, 12), DTN(12, 3, pool_size))
    compiled = torch.compile(model, fullgraph=True)
    x, upstream = torch.randn(2, 6, 8, 12, requires_grad=True), torch.randn(2, 6, 8, 12)
    tensors = [x, *model.parameters()]
    for got, want in zip(
        torch.autograd.grad(compiled(x), tensors, upstream),
        torch.autograd.grad(model(x), tensors, upstream),
        strict=True,
    ):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    kept = []
    for run in (model, compiled):
        with SavedBytes(model) as saved:
            _alive = run(x)
        kept.append(saved.total)
    assert kept[1] <= kept[0]


@pytest.mark.parametrize('pool_size', [1, 2, 4])
def test_keeps_its_input_and_little_more(pool_size):
    x = torch.randn(2, 28, 28, 64, requires_grad=True)
    layer = DTN(64, 4, pool_size)
    with SavedBytes(layer) as saved:
        _alive = layer(x)
    assert saved.total <= 1.2 * x.nbytes


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
@pytest.mark.parametrize('prenorm', [True, False])
def test_autocast_leaves_statistics_alone_and_gives_what_layernorm_gives(prenorm, dtype, monkeypatch):
    """A large mean and a tiny variance: in half precision E[x^2] - E[x]^2 is noise."""
    (x, *parameters), upstream = random_tensors((2, 8, 8, 16), 4)
    x = (1e3 + x.detach() / 4).requires_grad_()
    s = Settings(2, prenorm=prenorm)
    for back_end in ('', 'reference'):
        monkeypatch.setenv('MMDTN_BACKEND', back_end)
        plain = results(dtn, [x, *parameters], upstream, s)
        with torch.autocast('cpu', dtype=dtype):
            under_autocast = results(dtn, [x, *parameters], upstream, s)
            assert under_autocast['y'].dtype == nn.LayerNorm(16)(x).dtype
            assert dtn(Tensors(x.to(dtype), *parameters), s).dtype == nn.LayerNorm(16)(x.to(dtype)).dtype
        assert all(torch.equal(value, plain[name]) for name, value in under_autocast.items())


def test_fake_cuda_tensors_mix_no_device_and_wait_for_nothing():
    with FakeTensorMode(), torch.device('cuda'):
        layer = DTN(12, 3, 2)
        x = torch.randn(2, 9, 14, 12)
        assert (layer(x).device.type, layer(x).shape) == ('cuda', x.shape)
        assert layer(x.half()).dtype == nn.LayerNorm(12, dtype=torch.half)(x.half()).dtype == torch.float16
        fixed = DTN(12, 3, mean_lambda=0.5, var_lambda=0.5, position='uniform', affine=False)
        assert fixed(x).device.type == 'cuda'


def test_activation_checkpointing_and_fp16_steps_with_a_scaler():
    layer, x = DTN(16, 4), torch.randn(2, 6, 7, 16, requires_grad=True)
    plain = torch.autograd.grad(layer(x).square().sum(), [x, *layer.parameters()])
    again = torch.autograd.grad(checkpoint(layer, x, use_reentrant=False).square().sum(), [x, *layer.parameters()])
    assert all(map(torch.equal, plain, again))

    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler('cpu', init_scale=2.0**12)
    before = layer.weight.detach().clone()
    with torch.autocast('cpu', dtype=torch.float16):
        loss = layer(x.half()).float().square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    assert layer.weight.isfinite().all() and not torch.equal(layer.weight, before)


@pytest.mark.parametrize('pool_size', [1, 2])
def test_the_reference_runs_on_request(pool_size, monkeypatch):
    tensors, upstream = random_tensors((2, 9, 7, 24), 3)
    fast = results(dtn, tensors, upstream, Settings(pool_size))
    monkeypatch.setenv('MMDTN_BACKEND', 'reference')
    plain = results(dtn, tensors, upstream, Settings(pool_size))
    expected = results(reference.dtn, tensors, upstream, Settings(pool_size))
    assert all(torch.equal(value, expected[name]) for name, value in plain.items())
    assert not torch.equal(fast['y'], plain['y'])
    assert all(relative_error(fast[name], value.double()) < 1e-3 for name, value in plain.items())


def test_differentiates_twice():
    tensors, upstream = random_tensors((1, 4, 5, 8), 2)

    def second(function, tensors):
        gradients = torch.autograd.grad(
            function(Tensors(*tensors), Settings(2)), tensors, upstream.to(tensors[0]), create_graph=True
        )
        return torch.autograd.grad(sum(g.square().sum() for g in gradients), tensors, materialize_grads=True)

    for got, want in zip(second(dtn, tensors), second(reference.dtn, in_float64(tensors)), strict=True):
        assert relative_error(got, want) < 1e-3


def run_python(code, **environment):
    return subprocess.run(
        [sys.executable, '-W', 'ignore', '-c', textwrap.dedent(code)],
        capture_output=True,
        text=True,
        env=os.environ | environment,
        timeout=300,
    )


@pytest.mark.slow
def test_without_a_compiler_the_reference_runs_and_one_line_says_so(tmp_path):
    ran = run_python(
        """
        import torch
        from mmdtn.backbones import PVTDTN
        model = PVTDTN('tiny')
        sum(m.sum() for m in model(torch.randn(1, 3, 64, 64))).backward()
        assert all(p.grad is not None for p in model.parameters())
        """,
        CXX='no-such-compiler',
        TORCH_EXTENSIONS_DIR=str(tmp_path),
    )
    assert ran.returncode == 0, ran.stderr
    said = ran.stdout + ran.stderr
    assert said.count('DTN runs in plain torch') == 1 and 'mmdtn.doctor' in said


@pytest.mark.slow
def test_is_built_once_for_processes_that_start_together(tmp_path):
    code = 'import torch; from mmdtn.ops import dtn_cpu; assert dtn_cpu.works()'
    start = functools.partial(subprocess.Popen, [sys.executable, '-W', 'ignore', '-c', code])
    several = [start(env=os.environ | dict(TORCH_EXTENSIONS_DIR=str(tmp_path))) for _ in range(2)]
    assert [process.wait(300) for process in several] == [0, 0]
    (library,) = tmp_path.iterdir()
    assert library.suffix == '.so', 'nothing half made is left'


@pytest.mark.slow
def test_imports_and_runs_where_triton_and_resource_are_absent():
    ran = run_python(
        """
        import sys
        sys.modules['triton'] = sys.modules['resource'] = None
        import torch, mmdtn
        from mmdtn.norms import DTN
        assert DTN(8, 2)(torch.randn(1, 3, 4, 8)).isfinite().all()
        mmdtn.backbones.PVTDTN('tiny')(torch.randn(1, 3, 32, 32))
        """
    )
    assert ran.returncode == 0, ran.stderr
