"""DTN on CPUs: builds ``dtn_cpu.cpp``, and calls it.

It is built at first use, in seconds, into torch's folder for extensions, and ahead of time by
``python -m mmdtn.doctor``. Where it cannot be built the reference runs, and one line in the log says so.
"""

import ctypes
import functools
import hashlib
import os
import platform
import tempfile
from pathlib import Path

import torch
from mmengine.logging import print_log
from torch import Tensor

from .reference import Settings

DEVICE = 'cpu'
SOURCE = Path(__file__).with_suffix('.cpp')
# The vectors of dtn_cpu.cpp are as wide as these allow. -march=native would not do: GCC 12 takes a Zen 5 for a Zen 3.
ARCHITECTURES = {'AVX512': ['-march=x86-64-v4'], 'AVX2': ['-march=x86-64-v3']}


@functools.cache
def works(device: torch.device) -> bool:
    """Whether there is a library, which the first call builds."""
    try:
        _library()
    except Exception as error:  # compiler, ninja, setuptools and file system have no error in common
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
    """Where the library is, which the first call on a machine compiles. Raises what the compiler says."""
    if platform.system() == 'Windows':
        raise OSError('dtn_cpu.cpp needs GCC or Clang, whose vectors Visual C++ does not have.')
    from torch.utils import cpp_extension  # imports setuptools, which only those need who compile

    capability = torch.backends.cpu.get_cpu_capability()
    flags = ['-O3', '-std=c++20', '-fno-math-errno', *ARCHITECTURES.get(capability, [])]
    if platform.system() != 'Darwin':  # whose compiler has no OpenMP: one thread there
        flags.append('-fopenmp')
    made_of = hashlib.sha256(f'{torch.__version__} {flags} {SOURCE.read_text()}'.encode()).hexdigest()[:12]
    root = Path(os.environ.get('TORCH_EXTENSIONS_DIR') or cpp_extension.get_default_build_root())
    library = root / f'mmdtn_cpu_{made_of}.so'
    if not library.exists():
        root.mkdir(parents=True, exist_ok=True)
        # In a folder of its own: processes that build at once, or die while they do, leave each other whole files.
        with tempfile.TemporaryDirectory(dir=root) as folder:
            cpp_extension.load('mmdtn_cpu', [str(SOURCE)], flags, build_directory=folder, is_python_module=False)
            os.replace(f'{folder}/mmdtn_cpu.so', library)
    return library


TENSORS = (
    *('x', 'weight', 'bias', 'mean_lambda', 'var_lambda', 'position', 'of_tokens', 'of_channels', 'y', 'grad'),
    *('grad_x', 'grad_weight', 'grad_bias', 'grad_mean_lambda', 'grad_var_lambda', 'grad_position'),
    *('shares', 'scratch'),
)


class _Problem(ctypes.Structure):
    """``Problem`` of dtn_cpu.cpp: sizes, settings and tensors."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ('images', 'height', 'width', 'channels', 'heads', 'pool_size')),
        ('eps', ctypes.c_double),
        *((name, ctypes.c_int64) for name in ('prenorm', 'unbiased', 'pool_second_moment', 'identity')),
        *((name, ctypes.c_void_p) for name in TENSORS),
    ]


def forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    mean_lambda: Tensor,
    var_lambda: Tensor,
    position: Tensor,
    s: Settings,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """The output; for each image, planes of 1 / RMS of each head, mean, variance; and what was taken off, B x C."""
    x = x.float()
    (B, H, W, C), K = x.shape, len(position)
    y, of_tokens, of_channels = torch.empty_like(x), x.new_empty(B * (K + 2) * H * W), x.new_empty(B, C)
    inputs = x, weight, bias, mean_lambda, var_lambda, position
    _call('forward', s, *inputs, of_tokens, of_channels, y=y, scratch=_scratch(x, s, planes=4))
    return y.to(dtype), of_tokens, of_channels


def backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    mean_lambda: Tensor,
    var_lambda: Tensor,
    position: Tensor,
    of_tokens: Tensor,
    of_channels: Tensor,
    s: Settings,
) -> tuple[Tensor, ...]:
    """Gradients of x and of the parameters."""
    dtype, x, grad = x.dtype, x.float(), grad.float()
    (B, H, W, C), K, lanes = x.shape, len(position), _library().dtn_lanes()
    inputs = x, weight, bias, mean_lambda, var_lambda, position
    grads = torch.empty_like(x), *(torch.zeros_like(t) for t in inputs[1:])
    outputs = {f'grad_{name}': t for name, t in zip(TENSORS, grads, strict=False)}
    shares, scratch = x.new_empty(B, K * -(-(C // K) // lanes), 2, H, W), _scratch(x, s, planes=8)
    _call('backward', s, *inputs, of_tokens, of_channels, grad=grad, **outputs, shares=shares, scratch=scratch)
    return grads[0].to(dtype), *grads[1:]


def _call(direction: str, s: Settings, *tensors: Tensor, **others: Tensor) -> None:
    """The first of ``TENSORS`` in their order, others by name."""
    B, H, W, C = tensors[0].shape
    given = dict(zip(TENSORS, (t.contiguous() for t in tensors), strict=False)) | others
    pointers = {name: t.data_ptr() for name, t in given.items()}
    problem = _Problem(B, H, W, C, heads=len(given['position']), **s._asdict(), **pointers)
    getattr(_library(), f'dtn_{direction}')(ctypes.byref(problem))


def _scratch(x: Tensor, s: Settings, planes: int) -> Tensor:
    h, w = (-(-size // s.pool_size) for size in x.shape[1:3])
    return x.new_empty(torch.get_num_threads(), planes, h, w, _library().dtn_lanes())
