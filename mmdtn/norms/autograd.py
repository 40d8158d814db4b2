"""Where DTN meets autograd, autocast and the compiler."""

import functools
import types
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import function, graph, operators
from .cells import merge, split
from .function import Saved, Settings
from .inductor import OPTIONS


def dtn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    mean_lambda: Tensor,
    var_lambda: Tensor,
    position: Tensor,
    settings: Settings,
    compiled: bool = False,
) -> Tensor:
    """``function.forward`` with its backward pass. Output in the dtype that LayerNorm would give."""
    dtype = x.dtype
    if dtype in (torch.half, torch.bfloat16) and x.device.type == 'cuda' and torch.is_autocast_enabled('cuda'):
        dtype = torch.float32  # autocast runs LayerNorm in float32 on GPUs, but in the input's dtype on CPUs
    if torch.jit.is_tracing():  # a traced graph cannot hold a Function; what it is for, inference, does not need it
        cells, present = split(x.contiguous(), settings.pool_size)
        y, _ = graph.forward(cells, present, weight, bias, mean_lambda, var_lambda, position, dtype, settings)
        return merge(y, x.shape[1], x.shape[2])
    return _DTN.apply(x, weight, bias, mean_lambda, var_lambda, position, settings, dtype, compiled)


class _DTN(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, mean_lambda, var_lambda, position, settings, dtype, compiled):
        run = _runner('forward', settings, compiled, x)
        _, height, width, _ = x.shape
        with _no_autocast(x.device.type):
            # Cells are made outside the compiled region, which then has plain sizes to reason about.
            cells, present = split(x.contiguous(), settings.pool_size)
            y, saved = run(cells, present, weight, bias, mean_lambda, var_lambda, position, dtype)
        ctx.save_for_backward(x, weight, mean_lambda, var_lambda, *saved)
        ctx.settings, ctx.compiled = settings, compiled
        return merge(y, height, width)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, weight, mean_lambda, var_lambda, *saved = ctx.saved_tensors
        if torch.compiler.is_compiling() and not torch.compiler.is_exporting():
            x, *saved = (t if t is None else operators.after(grad, t) for t in (x, *saved))
        run = _runner('backward', ctx.settings, ctx.compiled, x)
        _, height, width, _ = x.shape
        with _no_autocast(x.device.type):
            cells, present = split(x.contiguous(), ctx.settings.pool_size)
            grad, _ = split(grad.contiguous(), ctx.settings.pool_size)
            grad_cells, *grads = run(grad, cells, present, weight, mean_lambda, var_lambda, Saved(*saved))
        return (merge(grad_cells, height, width), *grads, None, None, None)


def _no_autocast(device: str) -> AbstractContextManager:
    """Statistics cancel in half precision, so autocast may not touch them."""
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return nullcontext()


def _runner(name: str, settings: Settings, compiled: bool, x: Tensor) -> Callable:
    """A direction with its settings: in the graph of a compiled model, as a region compiled on its own, or as it is."""
    inside_a_compiled_model = torch.compiler.is_compiling()
    if not compiled and not inside_a_compiled_model:
        return functools.partial(getattr(function, name), s=settings)
    large = max(x.shape[1:3]) > LARGE_SIDE * settings.pool_size**2
    # Not in exported programs: elsewhere nobody knows this package's operators.
    settings = settings._replace(by_operators=large and not torch.compiler.is_exporting())
    if inside_a_compiled_model:
        return functools.partial(getattr(graph, name), s=settings)
    return _region(name, settings, x.shape[-1])


# Cells a side, for each token that a cell is wide, up to which ``blocks`` beat ``operators`` in compiled code: their
# sums take time in proportion to the cells a side, all else in proportion to the tokens in a cell.
LARGE_SIDE = 42


class _Region:
    """A function compiled on its own within an eager model, or run as it is where nothing can compile it."""

    works = True  # of all regions: what one cannot have for want of a compiler, no other will

    def __init__(self, name: str, settings: Settings, channels: int) -> None:
        self.eager = functools.partial(getattr(function, name), s=settings)
        # Dynamo keeps its variants, and what it learned of changing shapes, for each code object. With one of its own,
        # a layer's grid is static until it really changes, and its channels stay static whatever other layers have.
        run = getattr(graph, name)
        code = run.__code__.replace(co_name=f'{name}_{channels}_{abs(hash(settings))}')
        own = types.FunctionType(code, run.__globals__, argdefs=run.__defaults__)
        self.compiled = functools.partial(torch.compile(own, options=OPTIONS), s=settings)

    def __call__(self, *args: Any) -> Any:
        if not _Region.works:
            return self.eager(*args)
        try:
            return self.compiled(*args)
        except Exception as error:  # the compiler's own errors have no common class
            result = self.eager(*args)
            _Region.works = False
            warnings.warn(f'DTN runs uncompiled: torch.compile failed here with: {error}', stacklevel=2)
            return result


@functools.cache
def _region(name: str, settings: Settings, channels: int) -> Callable:
    return _Region(name, settings, channels)
