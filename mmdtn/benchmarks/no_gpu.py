"""Triton driver that stands in for a GPU. Triton compiles kernels for it but launches nothing.

``dtn_triton.forward`` and ``backward`` run on CPU tensors. Everything else works as on a GPU, so the kernels, their
constants and their arguments equal those of a real call.
"""

import itertools
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase

from mmdtn.ops import Settings, Tensors, dtn_triton

# Bytes of shared memory for one program, by compute capability (NVIDIA) or architecture (AMD).
SHARED_MEMORY: dict[int | str, int] = {
    **{75: 64 << 10, 80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10},
    **{'gfx90a': 64 << 10, 'gfx942': 64 << 10},
}
TOOLS = Path(triton.__file__).parent / 'backends/nvidia/bin'


class Layer(NamedTuple):
    """Sizes, settings and dtypes of a DTN layer."""

    batch: int
    height: int
    width: int
    channels: int
    heads: int
    settings: Settings
    dtypes: tuple[torch.dtype, torch.dtype] = (torch.float32, torch.float32)  # dtypes of input and output

    def tensors(self) -> Tensors:
        K, C = self.heads, self.channels
        x = torch.empty(self.batch, self.height, self.width, C, dtype=self.dtypes[0])
        return Tensors(x, torch.ones(C), torch.zeros(C), torch.rand(K), torch.rand(K), torch.randn(K, 3))


class Launch(NamedTuple):
    """Launch of a compiled kernel."""

    name: str
    grid: tuple[int, int, int]
    warps: int
    shared: int  # bytes
    binary: bytes
    arguments: tuple


_numbers = itertools.count()


class NoGPU(DriverBase):
    """Triton driver that compiles for a given architecture, and records launches."""

    def __init__(self, arch: int | str) -> None:
        self.arch, self.utils, self.number = arch, self, next(_numbers)
        self.launches: list[Launch] = []

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_current_target(self) -> GPUTarget:
        if isinstance(self.arch, str):
            return GPUTarget('hip', self.arch, 64)
        return GPUTarget('cuda', self.arch, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device('cpu')

    def get_benchmarker(self) -> Any:
        raise RuntimeError('There is no GPU to measure on.')

    def get_current_device(self) -> int:
        return self.number  # Triton caches kernels by device, so each driver compiles its own

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_device_properties(self, device: int) -> dict[str, int]:
        return dict(max_shared_mem=SHARED_MEMORY[self.arch])

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        def launch(x: int, y: int, z: int, stream: int, function: bytes, packed: Any, *rest: Any) -> None:
            arguments = rest[3:]  # the first three are metadata and hooks
            self.launches.append(
                Launch(metadata.name, (x, y, z), metadata.num_warps, metadata.shared, function, arguments)
            )

        return launch

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple:
        # Triton expects the module, function, registers, spills and, since version 3.4, the maximum number of threads.
        since_3_4 = tuple(map(int, triton.__version__.split('.')[:2])) >= (3, 4)
        return (object(), binary, 0, 0, 1024) if since_3_4 else (object(), binary, 0, 0)


@contextmanager
def no_gpu(arch: int | str) -> Iterator[NoGPU]:
    """Replaces Triton's driver within the context."""
    driver = NoGPU(arch)
    triton.runtime.driver.set_active(driver)
    try:
        yield driver
    finally:
        triton.runtime.driver.set_active(None)  # Triton then searches for a real driver
        _forget_compiled_kernels()


def _forget_compiled_kernels() -> None:
    """Frees memory, because the kernels for all layers of all models would take gigabytes."""
    dtn_triton._plan.cache_clear()
    for function in vars(dtn_triton).values():
        if isinstance(function, triton.JITFunction):
            function.device_caches.clear()


def launches(arch: int | str, layer: Layer) -> list[Launch]:
    """Compiles the kernels of a forward and a backward pass, and returns their launches.

    Raises the errors of the compiler and of Triton.
    """
    with no_gpu(arch) as driver:
        t = layer.tensors()
        y, kept = dtn_triton.forward(t, layer.settings, layer.dtypes[1])
        dtn_triton.backward(y, t, kept, layer.settings)
    return driver.launches


class Binary:
    """Machine code of a kernel for NVIDIA GPUs, which the Triton package's CUDA tools can read."""

    def __init__(self, code: bytes) -> None:
        self.code = code

    def _run(self, *command: str) -> str:
        with tempfile.NamedTemporaryFile(suffix='.cubin') as file:
            file.write(self.code)
            file.flush()
            tool = [str(TOOLS / command[0]), *command[1:], file.name]
            return subprocess.run(tool, capture_output=True, text=True, check=True).stdout

    @cached_property
    def usage(self) -> dict[str, int]:
        """Resource usage, such as the registers of a thread (``REG``) and the bytes that spill (``STACK``)."""
        return {
            name: int(number) for name, number in re.findall(r'([A-Z]+):(\d+)', self._run('cuobjdump', '-res-usage'))
        }

    @cached_property
    def sass(self) -> str:
        """The instructions as text."""
        return self._run('nvdisasm', '-c')
