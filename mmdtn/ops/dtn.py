"""The DTN operator, which chooses the back end for a device and connects it to autograd and compilers.

GPUs use the back end ``dtn_triton`` and CPUs use ``dtn_cpu``. ``reference`` covers all other cases.

Plain tensors go through an ``autograd.Function`` that calls the back end. Compilers, fake tensors and dispatch modes
use the custom operators ``mmdtn::dtn`` and ``mmdtn::dtn_backward``. The results are the same, but custom operators take
more time on the host. Because torch.compile cannot trace into them, it saves only their inputs and outputs for the
backward pass.
"""

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode  # the module of TorchDispatchMode itself

from . import dtn_cpu, dtn_triton, reference, triton_check
from .interface import Settings, Tensors

NUM_TENSORS, NUM_SETTINGS = len(Tensors._fields), len(Settings._fields)


def dtn(t: Tensors, s: Settings, dtype: torch.dtype | None = None) -> Tensor:
    """Normalises ``t.x``, ``B x H x W x C``. The default ``dtype`` is that of LayerNorm's output."""
    dtype = _dtype_of_layernorm(t.x) if dtype is None else dtype
    if _wants_plain_torch(t.x):
        with _exact_products(t.x.device.type):
            return reference.dtn(t, s).to(dtype)
    plain = type(t.x) in (Tensor, torch.nn.Parameter) and not is_in_torch_dispatch_mode()
    if not plain or torch.compiler.is_compiling():
        return _dtn(*t, dtype, *s)[0]
    _back_end(t.x)  # processes must agree on the back end here, because gradient mode is off inside a Function
    return _Eager.apply(*t, dtype, *s)[0]


def _dtype_of_layernorm(x: Tensor) -> torch.dtype:
    """Autocast runs LayerNorm in float32 on GPUs, but in the dtype of the input on CPUs."""
    if x.device.type == 'cuda' and x.dtype in (torch.half, torch.bfloat16) and torch.is_autocast_enabled('cuda'):
        return torch.float32
    return x.dtype


def _forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Returns the output and the tensor saved for the backward pass."""
    t, dtype, s = _contiguous(arguments[:NUM_TENSORS]), arguments[NUM_TENSORS], Settings(*arguments[NUM_TENSORS + 1 :])
    if (back_end := _back_end(t.x)) is not None:
        return back_end.forward(t, s, dtype)
    with _exact_products(t.x.device.type):
        y = reference.dtn(t, s)
    return y.to(dtype), _empty_kept(t, s).zero_()


def _backward(grad: Tensor, *arguments: Any) -> Tensors:
    """Returns the gradients of x and the parameters."""
    t, kept, s = _contiguous(arguments[:NUM_TENSORS]), arguments[NUM_TENSORS], Settings(*arguments[NUM_TENSORS + 1 :])
    if (back_end := _back_end(t.x)) is not None:
        return back_end.backward(grad.contiguous(), t, kept, s)
    return _reference_gradients(grad, t, s)


@torch.library.custom_op('mmdtn::dtn', mutates_args=())
def _dtn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    mean_lambda: Tensor,
    var_lambda: Tensor,
    position: Tensor,
    dtype: torch.dtype,
    pool_size: int,
    eps: float,
    prenorm: bool,
    unbiased: bool,
    pool_second_moment: bool,
    identity: bool,
) -> tuple[Tensor, Tensor]:
    tensors, settings = (
        (x, weight, bias, mean_lambda, var_lambda, position),
        (pool_size, eps, prenorm, unbiased, pool_second_moment, identity),
    )
    return _forward(*tensors, dtype, *settings)


@_dtn.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor]:
    t, dtype, s = Tensors(*arguments[:NUM_TENSORS]), arguments[NUM_TENSORS], Settings(*arguments[NUM_TENSORS + 1 :])
    return t.x.new_empty(t.x.shape, dtype=dtype), _empty_kept(t, s)


@torch.library.custom_op('mmdtn::dtn_backward', mutates_args=())
def _dtn_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    mean_lambda: Tensor,
    var_lambda: Tensor,
    position: Tensor,
    kept: Tensor,
    pool_size: int,
    eps: float,
    prenorm: bool,
    unbiased: bool,
    pool_second_moment: bool,
    identity: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    tensors, settings = (
        (x, weight, bias, mean_lambda, var_lambda, position),
        (pool_size, eps, prenorm, unbiased, pool_second_moment, identity),
    )
    return _backward(grad, *tensors, kept, *settings)


@_dtn_backward.register_fake
def _(grad: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    return tuple(tensor.new_empty(tensor.shape) for tensor in arguments[:NUM_TENSORS])


def _save(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    ctx.settings = Settings(*inputs[-NUM_SETTINGS:])
    ctx.save_for_backward(*inputs[:NUM_TENSORS], output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _differentiate(backward: Callable, ctx: Any, grad: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    no_others = (None,) * (1 + NUM_SETTINGS)
    if grad is None:
        return *(None,) * NUM_TENSORS, *no_others
    if torch.is_grad_enabled():  # create_graph=True, so the gradients may be differentiated
        t = Tensors(*ctx.saved_tensors[:NUM_TENSORS])
        return *_reference_gradients(grad, t, ctx.settings), *no_others
    return *backward(grad, *ctx.saved_tensors, *ctx.settings), *no_others


_dtn.register_autograd(functools.partial(_differentiate, _dtn_backward), setup_context=_save)


class _Eager(torch.autograd.Function):
    """The operator ``mmdtn::dtn`` without the overhead of torch's dispatcher."""

    forward = staticmethod(_forward)
    setup_context = staticmethod(_save)
    backward = staticmethod(functools.partial(_differentiate, _backward))


def _reference_gradients(grad: Tensor, t: Tensors, s: Settings) -> Tensors:
    # Unlike autograd, torch.func can differentiate inside a custom operator.
    with _exact_products(grad.device.type):
        y, pull_back, *_ = torch.func.vjp(functools.partial(reference.dtn, s=s), t)
        return pull_back(grad.to(y.dtype))[0]


def _contiguous(tensors: Any) -> Tensors:
    return Tensors(*(tensor.contiguous() for tensor in tensors))


def _back_end(x: Tensor) -> ModuleType | None:
    """Returns the back end for ``x``, or None for the reference. Only this function makes the choice."""
    if os.environ.get('MMDTN_BACKEND') == 'reference' or x.dtype == torch.float64 or x.numel() == 0:
        return None
    if x.device.type == dtn_triton.DEVICE:
        return dtn_triton if triton_check.works(x.device) else None
    return dtn_cpu if x.device.type == 'cpu' and dtn_cpu.works() else None


def _empty_kept(t: Tensors, s: Settings) -> Tensor:
    """Returns an empty tensor as large as the one that the device's back end saves. Compilers need its size."""
    size: Any = 0
    if t.x.device.type == dtn_triton.DEVICE:
        size = dtn_triton.kept_size(t.x.shape, len(t.position), s)
    elif t.x.device.type == 'cpu':
        size = dtn_cpu.kept_size(t.x.shape, len(t.position))
    return t.weight.new_empty(size)


def is_exporting() -> bool:
    """Returns whether torch.export is running. Up to torch 2.9, torch's function also returns True in torch.compile."""
    return torch.compiler.is_compiling() and not torch.compiler.is_dynamo_compiling()


def _wants_plain_torch(x: Tensor) -> bool:
    """Returns whether tracing, export or torch.func is running, none of which supports custom operators."""
    if torch.compiler.is_compiling():
        return is_exporting()
    # torch has no public function that tells whether torch.func is running.
    return torch.jit.is_tracing() or torch._C._functorch.is_functorch_wrapped_tensor(x)


@contextmanager
def _exact_products(device: str) -> Iterator[None]:
    """Turns off autocast and TF32, because E[z^2] - E[z]^2 would lose all precision with fewer digits."""
    if device == 'cuda' and not torch.compiler.is_compiling():
        before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = False
        try:
            with torch.autocast(device, enabled=False):
                yield
        finally:
            torch.backends.cuda.matmul.allow_tf32 = before
    elif torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        with torch.autocast(device, enabled=False):
            yield
    else:
        yield
