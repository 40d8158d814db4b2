"""The Triton kernels compiled for GPUs that are not there: no registers spilled, and products in full precision.

A driver that loads and launches nothing stands in for CUDA's: everything else runs as it does on a GPU.
"""

import re
import subprocess
from pathlib import Path

import pytest
import torch

from mmdtn.ops import Settings, Tensors, dtn_triton

triton = pytest.importorskip('triton')
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.backends.driver import DriverBase  # noqa: E402

CUOBJDUMP = Path(triton.__file__).parent / 'backends/nvidia/bin/cuobjdump'
SMALLEST_SHARED_MEMORY = 99 * 1024  # bytes for a program on consumer GPUs from sm_86 on

# H, W, C, heads, pool size. What is compiled does not depend on the batch.
SHAPES = [(200, 336, 64, 4, 4), (50, 84, 320, 5, 1), (14, 14, 432, 9, 1), (50, 84, 48, 1, 2), (28, 28, 768, 1, 1)]


class NoGPU(DriverBase):
    def __init__(self, target):
        self.target, self.utils, self.loaded = target, self, {}

    @classmethod
    def is_active(cls):
        return True

    def map_python_to_cpp_type(self, ty):
        return ty

    def get_current_target(self):
        return self.target

    def get_active_torch_device(self):
        return torch.device('cpu')

    def get_benchmarker(self):
        raise NotImplementedError

    def get_current_device(self):
        return id(self)  # kernels are cached by device

    def get_current_stream(self, device):
        return 0

    def get_device_properties(self, device):
        return dict(max_shared_mem=SMALLEST_SHARED_MEMORY)

    def launcher_cls(self, source, metadata):
        return lambda *args: None

    def load_binary(self, name, binary, shared, device):
        self.loaded[name] = binary
        return object(), None, 0, 0, 1024


def compile_for(target, shape, dtype):
    """What a layer runs forward and backward: names and binaries."""
    H, W, C, K, pool_size = shape
    driver, s = NoGPU(target), Settings(pool_size)
    triton.runtime.driver.set_active(driver)
    try:
        x, weight, mix, position = torch.zeros(1, H, W, C, dtype=dtype), torch.ones(C), torch.ones(K), torch.ones(K, 3)
        t = Tensors(x, weight, weight, mix, mix, position)
        _, kept = dtn_triton.forward(t, s, dtype)
        dtn_triton.backward(x, t, kept, s)
    finally:
        triton.runtime.driver.set_active(None)  # the real one, if there is one
    return driver


def kernels(driver):
    """The compiled kernels, with their intermediate forms."""
    device = driver.get_current_device()
    functions = (f for f in vars(dtn_triton).values() if isinstance(f, triton.JITFunction))
    return [kernel for f in functions if device in f.device_caches for kernel in f.device_caches[device][0].values()]


@pytest.mark.slow
@pytest.mark.parametrize('dtype', [torch.float32, torch.float16])
@pytest.mark.parametrize('shape', SHAPES, ids=str)
@pytest.mark.parametrize('arch', [80, 90])
def test_no_registers_spill(arch, shape, dtype, tmp_path):
    loaded = compile_for(GPUTarget('cuda', arch, 32), shape, dtype).loaded
    for name, binary in loaded.items():
        file = tmp_path / f'{name}.cubin'
        file.write_bytes(binary)
        usage = subprocess.run([CUOBJDUMP, '-res-usage', file], capture_output=True, text=True, check=True).stdout
        assert re.findall(r'STACK:(\d+)', usage) == ['0'], name


@pytest.mark.parametrize('shape', SHAPES[1:3], ids=str)
def test_products_are_as_exact_as_float32(shape):
    """Whatever torch.backends.cuda.matmul.allow_tf32 says: each product is three of TF32 that add up to it."""
    compiled = kernels(compile_for(GPUTarget('cuda', 80, 32), shape, torch.float32))
    products = [line for kernel in compiled for line in kernel.asm['ttir'].splitlines() if 'tt.dot' in line]
    assert products
    assert all('inputPrecision = tf32x3' in line for line in products)


def test_compiles_for_amd(monkeypatch):
    monkeypatch.setattr(torch.version, 'hip', '6.0')
    driver = compile_for(GPUTarget('hip', 'gfx942', 64), SHAPES[2], torch.float16)
    assert len(driver.loaded) == 6
    assert all('tf32' not in kernel.asm['ttir'] for kernel in kernels(driver))


def test_images_of_other_sizes_compile_nothing():
    numbers = []
    for grid in ((50, 84), (112, 65), (66, 128)):
        numbers.append(len(kernels(compile_for(GPUTarget('cuda', 80, 32), (*grid, 320, 5, 1), torch.float32))))
    assert numbers[0] == numbers[1] == numbers[2]


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


@pytest.mark.parametrize('shape', SHAPES[:3], ids=str)
def test_tensors_may_have_more_than_2_to_31_elements(shape):
    """Offsets within an image are 32 bits wide, those of images 64."""
    compiled = kernels(compile_for(GPUTarget('cuda', 80, 32), shape, torch.float32))
    for kernel in compiled:
        if kernel.metadata.name not in ('_axes', '_parameters'):  # which do not depend on the batch
            assert 'tt.get_program_id' in kernel.asm['ttir']
            assert not offsets_that_may_overflow(kernel.asm['ttir']), kernel.metadata.name
