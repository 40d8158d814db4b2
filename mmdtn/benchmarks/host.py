"""Measures host time, which Python and the launchers spend on a layer while the GPU computes or waits.

Small layers run on a GPU without synchronisation. Without a GPU, Triton's launcher calls a driver library that does
nothing, and torch's operators run on the CPU.
"""

import ctypes
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from unittest import mock

import torch
from torch import nn

from mmdtn.norms import DTN
from mmdtn.ops import dtn_triton, triton_check

# One layer for each set of kernels, as (height, width, channels, heads, pool size).
LAYERS = {'small': (4, 4, 8, 2, 1), 'large': (17, 3, 8, 2, 1), 'pooled': (5, 7, 8, 2, 2)}
DRIVER = """
#include <stdint.h>
/* The functions of libcuda that Triton's launcher calls. Each one succeeds. */
#define NUMBER(name, type, value) int name(type *out) { *out = (value); return 0; }
static char nothing[8];
int cuInit(unsigned flags) { return 0; }
NUMBER(cuDriverGetVersion, int, 13000)
NUMBER(cuCtxGetDevice, int, 0)
NUMBER(cuCtxGetCurrent, void *, nothing)
int cuDeviceGet(int *device, int number) { *device = number; return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = nothing; return 0; }
int cuCtxSetCurrent(void *context) { return 0; }
int cuCtxGetLimit(size_t *value, int limit) { *value = 0; return 0; }
int cuCtxSetLimit(int limit, size_t value) { return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) { *value = 166912; return 0; }
int cuModuleLoadData(void **module, const void *data) { *module = nothing; return 0; }
int cuModuleUnload(void *module) { return 0; }
int cuModuleGetFunction(void **function, void *module, const char *name) { *function = nothing; return 0; }
int cuFuncGetAttribute(int *value, int attribute, void *function) { *value = attribute ? 0 : 1024; return 0; }
int cuFuncSetAttribute(void *function, int attribute, int value) { return 0; }
int cuFuncSetCacheConfig(void *function, int config) { return 0; }
int cuPointerGetAttribute(void *value, int attribute, uint64_t pointer) { *(uint64_t *)value = pointer; return 0; }
int cuOccupancyMaxActiveClusters(int *number, void *function, void *config) { *number = 1; return 0; }
int cuGetErrorString(int error, const char **text) { *text = "none"; return 0; }
int cuLaunchKernelEx(const void *config, void *function, void **arguments, void **extra) { return 0; }
"""


@contextmanager
def idle_driver() -> Iterator[None]:
    """Makes CPU tensors take the code path of CUDA tensors. The driver launches nothing."""
    import triton
    from triton.backends.nvidia.driver import CudaDriver, CudaLauncher, CudaUtils

    class Idle(CudaDriver):
        def __init__(self) -> None:
            self.utils, self.launcher_cls = CudaUtils(), CudaLauncher
            self.get_device_capability = lambda device=0: (8, 0)
            self.get_current_stream = lambda device: 0
            self.get_current_device = lambda: 0
            self.set_current_device = lambda device: None

        def get_active_torch_device(self) -> torch.device:
            return torch.device('cpu')

    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, 'driver.c'), Path(folder, 'libcuda.so.1')
        source.write_text('#include <stddef.h>\n' + DRIVER)
        named = '-Wl,-soname,libcuda.so.1'  # libraries that are loaded later find it by this name
        subprocess.run(['gcc', '-shared', '-fPIC', '-w', named, '-o', library, source], check=True)
        Path(folder, 'libcuda.so').symlink_to(library)
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
        cache = dict(TRITON_LIBCUDA_PATH=folder, TRITON_CACHE_DIR=f'{folder}/cache')
        with mock.patch.dict(os.environ, cache):
            triton.runtime.driver.set_active(Idle())
            # Users never need to send CPU tensors to the GPU back end, so no public option does so.
            with (
                mock.patch.object(dtn_triton, 'DEVICE', 'cpu'),
                mock.patch.object(triton_check, 'works', lambda device: True),
            ):
                yield
            triton.runtime.driver.set_active(None)


def microseconds(run: Callable[[], object], repeats: int = 400) -> float:
    """Returns the 10th percentile of the run time in microseconds.

    Other processes on the machine can only slow runs down, so low percentiles are more reliable than the mean.
    """
    times = []
    for i in range(repeats):
        if i % 50 == 0 and torch.cuda.is_available():
            torch.cuda.synchronize()  # otherwise, the launch queue fills up and the host waits
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return sorted(times)[repeats // 10] * 1e6


def measure() -> dict[str, tuple[float, float]]:
    """Returns the host times of each layer and of LayerNorm, for a forward pass alone and for both passes."""
    device = 'cuda' if torch.cuda.is_available() else 'cpu'
    results = {}
    with nullcontext() if device == 'cuda' else idle_driver():
        for name, (height, width, channels, heads, pool_size) in {**LAYERS, 'LayerNorm': LAYERS['small']}.items():
            layer = nn.LayerNorm(channels) if name == 'LayerNorm' else DTN(channels, heads, pool_size)
            layer.to(device)
            x = torch.randn(1, height, width, channels, device=device, requires_grad=True)
            results[name] = _both(layer, x, torch.randn_like(x))
    return results


def _both(layer: nn.Module, x: torch.Tensor, upstream: torch.Tensor) -> tuple[float, float]:
    parameters = [x, *layer.parameters()]
    with torch.no_grad():
        forward = microseconds(lambda: layer(x))
    return forward, microseconds(lambda: torch.autograd.grad(layer(x), parameters, upstream))
