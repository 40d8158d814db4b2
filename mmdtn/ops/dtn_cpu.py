"""Compiles ``dtn_cpu.cpp``, the CPU back end of DTN, and calls it.

The first call compiles the library into torch's folder for extensions, which takes a few seconds. ``python -m
mmdtn.doctor`` does so in advance. If compilation fails, the reference runs instead, and the log states the reason.
"""

import ctypes
import functools
import hashlib
import os
import platform
import tempfile
from pathlib import Path
from typing import Any

import torch
from mmengine.logging import print_log
from torch import Tensor

from .interface import Settings, Tensors

SOURCE = Path(__file__).with_suffix('.cpp')
# These flags set the vector width of dtn_cpu.cpp. With -march=native, GCC 12 would mistake a Zen 5 for a Zen 3.
ARCHITECTURES = {'AVX512': ['-march=x86-64-v4'], 'AVX2': ['-march=x86-64-v3']}


@functools.cache
def works() -> bool:
    """Returns whether the library can be loaded. The first call compiles the library if necessary."""
    try:
        _library()
    except Exception as error:  # the compiler, ninja, setuptools and the file system share no error class
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        print_log(
            f'DTN runs in plain torch, several times slower, as its C++ could not be built ({reason}). '
            '`python -m mmdtn.doctor` says what to install.',
            'current',
        )
        return False
    return True


@functools.cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(str(build()))


def build() -> Path:
    """Returns the path of the library after compiling it if necessary. Raises the compiler's error."""
    if platform.system() == 'Windows':
        raise OSError('dtn_cpu.cpp needs GCC or Clang, because Visual C++ lacks their vector extensions.')
    from torch.utils import cpp_extension  # imports setuptools, which is needed only for compiling

    capability = torch.backends.cpu.get_cpu_capability()
    flags = ['-O3', '-std=c++20', '-fno-math-errno', *ARCHITECTURES.get(capability, [])]
    if platform.system() != 'Darwin':  # Apple's compiler has no OpenMP, so DTN uses one thread there
        flags.append('-fopenmp')
    made_of = hashlib.sha256(f'{torch.__version__} {flags} {SOURCE.read_text()}'.encode()).hexdigest()[:12]
    root = Path(os.environ.get('TORCH_EXTENSIONS_DIR') or cpp_extension.get_default_build_root())
    library = root / f'mmdtn_cpu_{made_of}.so'
    if not library.exists():
        root.mkdir(parents=True, exist_ok=True)
        # A temporary folder keeps parallel and interrupted builds from leaving a damaged library.
        with tempfile.TemporaryDirectory(dir=root) as folder:
            cpp_extension.load('mmdtn_cpu', [str(SOURCE)], flags, build_directory=folder, is_python_module=False)
            os.replace(f'{folder}/mmdtn_cpu.so', library)
    return library


class _Problem(ctypes.Structure):
    """Mirrors the struct ``Problem`` of dtn_cpu.cpp: sizes, settings and pointers to tensors."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ('images', 'height', 'width', 'channels', 'heads', 'pool_size')),
        ('eps', ctypes.c_double),
        *((name, ctypes.c_int64) for name in ('prenorm', 'unbiased', 'pool_second_moment', 'identity')),
        *((name, ctypes.c_void_p) for name in (*Tensors._fields, 'of_tokens', 'of_channels', 'y', 'grad')),
        *((f'grad_{name}', ctypes.c_void_p) for name in Tensors._fields),
        *((name, ctypes.c_void_p) for name in ('shares', 'scratch')),
    ]


def kept_size(shape: Any, heads: int) -> int:
    """Returns the number of floats that ``forward`` saves. An image has K + 2 planes of tokens and C shifts."""
    B, H, W, C = shape
    return B * H * W * (heads + 2) + B * C


def forward(t: Tensors, s: Settings, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns the output and the tensor saved for ``backward``."""
    t = t._replace(x=t.x.float())
    y, kept = torch.empty_like(t.x), t.x.new_empty(kept_size(t.x.shape, len(t.position)))
    _call('forward', t, s, kept, y=y, scratch=_scratch(t, s, planes=4))
    return y.to(dtype), kept


def backward(grad: Tensor, t: Tensors, kept: Tensor, s: Settings) -> Tensors:
    """Returns the gradients of x and the parameters. ``kept`` is the tensor that ``forward`` saved."""
    dtype, t, grad = t.x.dtype, t._replace(x=t.x.float()), grad.float()
    (B, H, W, C), K = t.x.shape, len(t.position)
    shares = t.x.new_empty(B, K * -(-(C // K) // _library().dtn_lanes()), 2, H, W)
    grads = Tensors(torch.empty_like(t.x), *(torch.zeros_like(parameter) for parameter in t[1:]))
    by_name = {f'grad_{name}': tensor for name, tensor in grads._asdict().items()}
    _call('backward', t, s, kept, grad=grad, **by_name, shares=shares, scratch=_scratch(t, s, planes=8))
    return grads._replace(x=grads.x.to(dtype))


def _call(direction: str, t: Tensors, s: Settings, kept: Tensor, **others: Tensor) -> None:
    B, H, W, C = t.x.shape
    others |= dict(of_tokens=kept, of_channels=kept[-B * C :])
    pointers = {name: tensor.data_ptr() for name, tensor in (t._asdict() | others).items()}
    problem = _Problem(B, H, W, C, heads=len(t.position), **s._asdict(), **pointers)
    getattr(_library(), f'dtn_{direction}')(ctypes.byref(problem))


def _scratch(t: Tensors, s: Settings, planes: int) -> Tensor:
    h, w = (-(-size // s.pool_size) for size in t.x.shape[1:3])
    return t.x.new_empty(torch.get_num_threads(), planes, h, w, _library().dtn_lanes())
