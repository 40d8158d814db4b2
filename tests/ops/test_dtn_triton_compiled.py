"""Compiles the Triton kernels as they are launched, without a GPU.

The layers of the self-check come first. They are the first that a GPU runs, and they cover every branch of the kernels.
The exhaustive part compiles the layers of every registered architecture for every supported GPU.
"""

import os
import re
import subprocess
import sys

import pytest
import torch

pytest.importorskip('triton')
import triton

from mmdtn.benchmarks.no_gpu import SHARED_MEMORY, Binary, Layer, launches, no_gpu
from mmdtn.ops import Settings, dtn_triton, triton_check

HALF = (torch.float16, torch.float16)
# Bytes per thread that kernels spill in some layers of some models, mostly in half precision on sm_100 and sm_120.
KNOWN_SPILLS = dict(_grid_backward=40, _columns_backward=40, _rows=8, _parameters=8)
# What the self-check's layers do not have: wide heads, and other settings.
OTHERS = [
    Layer(1, 50, 84, 320, 5, Settings()),
    Layer(1, 14, 14, 432, 9, Settings(), HALF),
    Layer(1, 28, 28, 768, 1, Settings(), (torch.float32, torch.float16)),
    Layer(1, 28, 28, 3 * 1152, 3, Settings(2, unbiased=True), (torch.bfloat16, torch.bfloat16)),
    Layer(1, 37, 6, 24, 2, Settings(2, prenorm=False, pool_second_moment=False)),
    Layer(1, 5, 40, 24, 2, Settings(identity=True, prenorm=False)),
]


def checked_layers(cases):
    return [
        Layer(2, *case.grid, case.channels, case.heads, Settings(case.pool_size), (case.dtype, case.dtype))
        for case in cases
    ]


def compile_for(arch, layer):
    compiled = launches(arch, layer)
    for launch in compiled:
        assert launch.shared <= SHARED_MEMORY[arch], launch.name
    return compiled


def assert_that_no_registers_spill(arch, compiled, known=()):
    for launch in compiled:
        if not isinstance(arch, str):
            allowed = dict(known).get(launch.name, 0)
            assert Binary(launch.binary).usage['STACK'] <= allowed, f'{launch.name} spills registers'


LAYERS = checked_layers(triton_check.SHORT) + OTHERS


@pytest.mark.slow
@pytest.mark.parametrize('layer', LAYERS, ids=str)
@pytest.mark.parametrize('arch', [80, 90])
def test_compiles_as_it_is_launched(arch, layer):
    compile_for(arch, layer)


@pytest.mark.slow
@pytest.mark.parametrize('layer', LAYERS, ids=str)
@pytest.mark.parametrize('arch', [80, 90])
def test_no_registers_spill(arch, layer):
    """With the Triton of the requirements: others allocate registers in another way."""
    assert_that_no_registers_spill(arch, compile_for(arch, layer))


@pytest.mark.exhaustive
@pytest.mark.parametrize('arch', SHARED_MEMORY)
def test_all_layers_of_all_models_compile_as_they_are_launched(arch):
    from .model_layers import all_layers

    for layer in [*checked_layers(triton_check.LONG), *all_layers()]:
        for dtypes in ((torch.float32, torch.float32), HALF, (torch.bfloat16, torch.bfloat16)):
            assert_that_no_registers_spill(arch, compile_for(arch, layer._replace(dtypes=dtypes)), KNOWN_SPILLS)


@pytest.mark.parametrize('arch', [75, 'gfx942'])
def test_gpus_without_tf32_compile_plain_products(arch):
    """sm_75 has too little shared memory for one program a grid, and takes the other kernels."""
    for launch in launches(arch, Layer(1, 14, 14, 64, 1, Settings())):
        assert launch.shared <= SHARED_MEMORY[arch]
        assert launch.name not in ('_grid', '_grid_backward') or arch != 75


def compiled_kernels(arch, *layers):
    """The kernels of these layers with their intermediate code."""
    with no_gpu(arch) as driver:
        for layer in layers:
            t = layer.tensors()
            y, kept = dtn_triton.forward(t, layer.settings, layer.dtypes[1])
            dtn_triton.backward(y, t, kept, layer.settings)
        functions = [f for f in vars(dtn_triton).values() if isinstance(f, triton.JITFunction)]
        device = driver.get_current_device()
        return [kernel for f in functions for kernel in f.device_caches[device][0].values()]


@pytest.mark.parametrize('layer', OTHERS[:2], ids=str)
def test_products_are_as_exact_as_float32(layer):
    """Whatever torch.backends.cuda.matmul.allow_tf32 says: each product is three of TF32 that add up to it."""
    products = [
        line for kernel in compiled_kernels(80, layer) for line in kernel.asm['ttir'].splitlines() if 'tt.dot' in line
    ]
    assert products
    assert all('inputPrecision = tf32x3' in line for line in products)


def test_images_of_other_sizes_compile_nothing():
    layer = Layer(1, 50, 84, 320, 5, Settings())
    sizes = [layer, layer._replace(height=112, width=65), layer._replace(height=66, width=128, batch=3)]
    assert len(compiled_kernels(80, *sizes)) == len(compiled_kernels(80, layer)) == 8


def test_later_launches_have_the_arguments_of_the_first():
    """The first launch goes through Triton's public syntax, later ones call the compiled kernel."""
    with no_gpu(80) as driver:
        t = OTHERS[4].tensors()
        dtn_triton.forward(t, OTHERS[4].settings, torch.float32)
        first = list(driver.launches)
        driver.launches.clear()
        dtn_triton.forward(t, OTHERS[4].settings, torch.float32)
        assert dtn_triton.Launcher.direct
    assert [launch[:-1] for launch in driver.launches] == [launch[:-1] for launch in first]

    def flat(arguments):
        for argument in arguments:
            if isinstance(argument, tuple):
                yield from flat(argument)
            else:
                yield argument.shape if isinstance(argument, torch.Tensor) else getattr(argument, 'value', argument)

    for before, after in zip(first, driver.launches, strict=True):
        assert list(flat(before.arguments)) == list(flat(after.arguments)), before.name


def test_a_triton_that_cannot_call_compiled_kernels_launches_them_the_public_way(monkeypatch):
    monkeypatch.setattr(dtn_triton.Launcher, 'direct', True)
    monkeypatch.delattr(triton.compiler.CompiledKernel, '__getitem__')
    layer = OTHERS[4]
    with no_gpu(80) as driver:
        for _ in range(2):
            dtn_triton.forward(layer.tensors(), layer.settings, torch.float32)
    assert [launch.name for launch in driver.launches] == ['_axes', '_statistics', '_rows', '_columns'] * 2


def test_unaligned_tensors_are_copied():
    """Kernels are compiled for tensors that begin at multiples of 16 bytes."""
    layer = OTHERS[4]
    t = layer.tensors()
    moved = [torch.empty(tensor.numel() + 1)[1:].view(tensor.shape) for tensor in t]
    with no_gpu(80) as driver:
        dtn_triton.forward(type(t)(*moved), layer.settings, torch.float32)
    memory = driver.launches[-1].arguments[0]
    assert all(tensor.data_ptr() % 16 == 0 for tensor in memory if isinstance(tensor, torch.Tensor))


UNBOUNDED = re.compile(r'arith\.(?:addi|subi|divsi)|tt\.(?:splat|broadcast|expand_dims|reshape)')


def offsets_that_may_overflow(ttir):
    """Where a 32-bit number that grows with the number of programs, as with the batch, is multiplied or an offset."""
    unbounded, found = set(), []
    for line in ttir.splitlines():
        name, _, operation = line.strip().partition(' = ')
        grows = unbounded & set(re.findall(r'%[\w#]+', operation))
        if 'tt.get_program_id' in operation or (grows and UNBOUNDED.match(operation)):
            unbounded.add(name)
        if grows and re.match(r'arith\.muli|tt\.addptr', operation):
            found.append(line)
    return found


@pytest.mark.parametrize('layer', [Layer(1, 200, 336, 64, 4, Settings(4)), *OTHERS[:2]], ids=str)
def test_tensors_may_have_more_than_2_to_31_elements(layer):
    """Offsets within an image are 32 bits wide, those of images 64."""
    for kernel in compiled_kernels(80, layer):
        if kernel.metadata.name not in ('_axes', '_parameters'):  # which do not depend on the batch
            assert 'tt.get_program_id' in kernel.asm['ttir']
            assert not offsets_that_may_overflow(kernel.asm['ttir']), kernel.metadata.name


@pytest.mark.slow
def test_the_self_check_runs_inside_a_step(tmp_path):
    """As a GPU's first step runs it: under activation checkpointing and inference mode, with other defaults."""
    code = """
import torch
from torch.utils.checkpoint import checkpoint
from mmdtn.backbones.layers import run_block
from mmdtn.norms import DTN
from mmdtn.ops import triton_check

layer, x = DTN(8, 2), torch.randn(1, 3, 3, 8, requires_grad=True)
run_block(layer, x, again=True).sum().backward()
assert x.grad.isfinite().all()
assert triton_check.works(torch.device('cpu'))
for default in (torch.inference_mode(), torch.device('meta'), torch.autocast('cpu', torch.bfloat16)):
    with default:
        assert triton_check.self_check(torch.device('cpu'), triton_check.SHORT[:1]) is None, default
torch.set_default_dtype(torch.float16)
assert triton_check.self_check(torch.device('cpu'), triton_check.SHORT[:1]) is None
"""
    environment = dict(os.environ, TRITON_INTERPRET='1', XDG_CACHE_HOME=str(tmp_path))
    run = subprocess.run([sys.executable, '-W', 'ignore', '-c', code], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
