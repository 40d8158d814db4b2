"""The DTN operator: one node for autograd, autocast and compilers, computed by the back end of its device.

``mmdtn::dtn`` and ``mmdtn::dtn_backward`` are opaque to torch.compile, so nothing is kept that was not asked for. The
back ends are ``dtn_triton`` on GPUs and ``dtn_cpu`` on CPUs; what they do not take, ``reference`` computes.
"""

import functools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from . import dtn_cpu, dtn_triton, reference
from .reference import Settings


def dtn(
    x: Tensor, weight: Tensor, bias: Tensor, mean_lambda: Tensor, var_lambda: Tensor, position: Tensor, s: Settings
) -> Tensor:
    """Normalises ``x``, B x H x W x C; gives the dtype that LayerNorm would give.

    ``weight``, ``bias``: C; lambdas: K; ``position``: K x 3. They have the dtype to compute in: float32, or float64.
    """
    dtype = x.dtype
    if x.device.type == 'cuda' and torch.is_autocast_enabled('cuda') and dtype in (torch.half, torch.bfloat16):
        dtype = torch.float32  # autocast runs LayerNorm in float32 on GPUs, but in the input's dtype on CPUs
    tensors = x, weight, bias, mean_lambda, var_lambda, position
    if _wants_plain_torch(x):
        with _exact_products(x.device.type):
            return reference.dtn(*tensors, s).to(dtype)
    if not torch.compiler.is_compiling() and type(x) in (Tensor, torch.nn.Parameter):
        _back_end(x)  # which builds or checks it, here where grad mode tells whether all processes train
    return _dtn(*tensors, dtype, *s)[0]


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
) -> tuple[Tensor, Tensor, Tensor]:
    """The output, and for the backward pass K + 2 numbers for each token, in the back end's own order, and B x C."""
    s = Settings(pool_size, eps, prenorm, unbiased, pool_second_moment, identity)
    tensors = x.contiguous(), weight, bias, mean_lambda, var_lambda, position
    if (back_end := _back_end(x)) is not None:
        return back_end.forward(*tensors, s, dtype)
    with _exact_products(x.device.type):
        y = reference.dtn(*tensors, s)
    of_tokens, of_channels = _statistics(x, weight, mean_lambda)
    return y.to(dtype), of_tokens.zero_(), of_channels.zero_()


@_dtn.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor, mean_lambda: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    dtype = rest[2]
    return x.new_empty(x.shape, dtype=dtype), *_statistics(x, weight, mean_lambda)


def _statistics(x: Tensor, weight: Tensor, mean_lambda: Tensor) -> tuple[Tensor, Tensor]:
    B, H, W, C = x.shape
    return weight.new_empty(B * H * W * (len(mean_lambda) + 2)), weight.new_empty(B, C)


@torch.library.custom_op('mmdtn::dtn_backward', mutates_args=())
def _dtn_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    mean_lambda: Tensor,
    var_lambda: Tensor,
    position: Tensor,
    of_tokens: Tensor,
    of_channels: Tensor,
    pool_size: int,
    eps: float,
    prenorm: bool,
    unbiased: bool,
    pool_second_moment: bool,
    identity: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """From the gradient of the output those of x and of the parameters."""
    s = Settings(pool_size, eps, prenorm, unbiased, pool_second_moment, identity)
    grad, tensors = grad.contiguous(), (x.contiguous(), weight, bias, mean_lambda, var_lambda, position)
    if (back_end := _back_end(x)) is not None:
        return back_end.backward(grad, *tensors, of_tokens, of_channels, s)
    return _reference_gradients(grad, tensors, s)


@_dtn_backward.register_fake
def _(grad: Tensor, *tensors: Any) -> tuple[Tensor, ...]:
    x, *parameters = tensors[:6]
    return x.new_empty(x.shape), *(torch.empty_like(p) for p in parameters)


def _save(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor, Tensor]) -> None:
    *tensors, _ = inputs[:7]
    ctx.settings = Settings(*inputs[7:])
    ctx.save_for_backward(*tensors, *output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    no_others = (None,) * (1 + len(Settings._fields))
    if grad is None:
        return (None,) * 6 + no_others
    *tensors, of_tokens, of_channels = ctx.saved_tensors
    if torch.is_grad_enabled():  # create_graph=True: the gradients will be differentiated
        return *_reference_gradients(grad, tensors, ctx.settings), *no_others
    return *_dtn_backward(grad, *tensors, of_tokens, of_channels, *ctx.settings), *no_others


_dtn.register_autograd(_differentiate, setup_context=_save)


def _reference_gradients(grad: Tensor, tensors: Sequence[Tensor], s: Settings) -> Any:
    # torch.func differentiates inside an operator too, where autograd is off.
    with _exact_products(grad.device.type):
        y, pull_back, *_ = torch.func.vjp(functools.partial(reference.dtn, s=s), *tensors)
        return pull_back(grad.to(y.dtype))


def _back_end(x: Tensor) -> ModuleType | None:
    """The fast back end for ``x``: the only place that chooses. None is the reference."""
    if os.environ.get('MMDTN_BACKEND') == 'reference' or x.dtype == torch.float64 or x.numel() == 0:
        return None
    for back_end in (dtn_cpu, dtn_triton):
        if x.device.type == back_end.DEVICE and back_end.works(x.device):
            return back_end
    return None


def _wants_plain_torch(x: Tensor) -> bool:
    """Elsewhere nobody knows this package's operators, and torch.func cannot look into them."""
    if torch.compiler.is_compiling():
        return torch.compiler.is_exporting()
    # No public function tells whether torch.func is at work; torch.library has none for its derivatives either.
    return torch.jit.is_tracing() or torch._C._functorch.is_functorch_wrapped_tensor(x)


@contextmanager
def _exact_products(device: str) -> Iterator[None]:
    """Neither autocast nor TF32 may touch statistics: E[z^2] - E[z]^2 cancels."""
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
