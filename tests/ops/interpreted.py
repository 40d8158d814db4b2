"""Helpers of tests that run the Triton kernels under Triton's interpreter.

The interpreter has to be chosen before the kernels are defined. A test file runs itself again in a process of its own,
in which ``INTERPRETED`` is true.
"""

import os
import subprocess
import sys

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mmdtn.ops import Tensors

INTERPRETED = os.environ.get('TRITON_INTERPRET') == '1'
GUARD = 256  # bytes in front of and behind each tensor
POISON = 255  # value of unwritten bytes. A floating-point number of any size that consists of such bytes is nan.


def run_interpreted(file):
    """Runs a test file under the interpreter and asserts that it passes."""
    run = subprocess.run(
        [sys.executable, '-m', 'pytest', '-n', '0', '-W', 'ignore', file],
        env=dict(os.environ, TRITON_INTERPRET='1'),
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-5000:] + run.stderr[-1000:]


class Guards(TorchDispatchMode):
    """Fills allocated memory with nan. Puts guards of nan around it, which nothing may change."""

    def __init__(self):
        super().__init__()
        self.buffers = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if not func.overloadpacket.__name__.removeprefix('new_').startswith('empty') or not result.numel():
            return result
        buffer = torch.full((result.nbytes + 2 * GUARD,), POISON, dtype=torch.uint8)
        self.buffers.append(buffer)
        return buffer[GUARD:-GUARD].view(result.dtype).view(result.shape)

    def untouched(self):
        return self.buffers and all((b[:GUARD] == POISON).all() and (b[-GUARD:] == POISON).all() for b in self.buffers)


def tensors(B, H, W, C, K, dtype, offset=0.0):
    """The gradient of the output, the input and the parameters of a layer, all random."""
    generator = torch.Generator().manual_seed(H * W + C)
    x, grad = ((torch.randn(B, H, W, C, generator=generator) + at).to(dtype) for at in (offset, 0))
    weight, bias = torch.randn(2, C, generator=generator)
    mean_lambda, var_lambda = torch.rand(2, K, generator=generator)
    position = torch.randn(K, 3, generator=generator) * 0.3
    return grad, Tensors(x, weight, bias, mean_lambda, var_lambda, position)
