"""Products of kernels, ``K x n x n``, one for each head.

A head looks for statistics where it has learned to, mostly near: of a wide kernel most is zero, and CPUs leave that
out. GPUs multiply all, as to look at values they would have to wait.
"""

import functools
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

SMALL = 48  # cells a side, below which one call for all heads is faster
WIDE = 128  # cells a side, from which on it pays to leave zeros out, by blocks of so many rows:
BLOCK = 48


def multiply(kernel: Tensor, matrices: Tensor, out: Tensor) -> Tensor:
    """``K x n x n`` times ``B x K x n x m``, in ``out``, which may have the ``m`` in any shape and memory."""
    if not _by_parts(kernel, SMALL if _by_onednn(kernel) else WIDE):
        if out.is_contiguous():
            torch.matmul(kernel, matrices, out=out.view_as(matrices))
            return out
        return out.copy_(torch.matmul(kernel, matrices).view(out.shape))
    for head, rows, columns in _parts(kernel):
        for to, m in zip(out[:, head, rows], matrices[:, head, columns], strict=True):
            to.copy_(_product(kernel[head, rows, columns], m).view(to.shape))
    return out


def kernel_gradient(grad: Tensor, matrices: Tensor, kernel: Tensor) -> Tensor:
    """Of the gradient ``K x n x n``, from two ``B x K x n x m``, what falls where the kernel is not zero."""
    if not _by_parts(kernel, SMALL):
        return torch.bmm(grad.flatten(0, 1), matrices.flatten(0, 1).mT).view(-1, *kernel.shape).sum(0)
    result = torch.zeros_like(kernel)
    for head, rows, columns in _parts(kernel):
        for g, m in zip(grad[:, head, rows], matrices[:, head, columns], strict=True):
            result[head, rows, columns] += _product(g, m.mT)
    return result


def _by_parts(kernel: Tensor, size: int) -> bool:
    """On CPUs, from this size on."""
    return kernel.device.type == 'cpu' and type(kernel) is Tensor and len(kernel[0]) >= size  # fake ones have no values


def _parts(kernel: Tensor) -> Iterator[tuple[int, slice, slice]]:
    """Heads, and rows of them, with the columns where those rows are not all zero."""
    heads, n = kernel.shape[:2]
    reaches = [n] * heads
    if n >= WIDE:
        index = torch.arange(n)
        reaches = ((kernel != 0) * (index[None] - index[:, None]).abs()).amax((1, 2)).tolist()
    for head, reach in enumerate(reaches):
        if BLOCK + 2 * reach > n / 2:
            yield head, slice(n), slice(n)
        else:
            for start in range(0, n, BLOCK):
                yield head, slice(start, start + BLOCK), slice(max(0, start - reach), start + BLOCK + reach)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b``, where MKL behind it would be slow."""
    return torch.ops.mkldnn._linear_pointwise(a, b.mT, None, 'none', [], '') if _by_onednn(a) else a @ b


def _by_onednn(a: Tensor) -> bool:
    """MKL uses AVX-512 on Intel's CPUs, up to three times as fast there as oneDNN; on AMD's it is half as fast."""
    return a.dtype == torch.float32 and not _of_intel() and _has_avx512_linear()


@functools.cache
def _of_intel() -> bool:
    cpuinfo = Path('/proc/cpuinfo')
    return cpuinfo.exists() and 'GenuineIntel' in cpuinfo.read_text()


@functools.cache
def _has_avx512_linear() -> bool:
    return (
        torch.backends.mkldnn.is_available()
        and torch.backends.cpu.get_cpu_capability() == 'AVX512'
        and hasattr(torch.ops.mkldnn, '_linear_pointwise')
    )
