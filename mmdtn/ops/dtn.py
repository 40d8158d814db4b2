"""The DTN operator: one node for autograd, autocast and compilers, computed by the back end of its device.

``mmdtn::dtn`` and ``mmdtn::dtn_backward`` are opaque to torch.compile, so nothing is kept that was not asked for. The
back ends are ``dtn_triton`` on GPUs and ``dtn_cpu`` on CPUs; what they do not take, ``reference`` computes.
"""

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from . import dtn_cpu, dtn_triton, reference
from .interface import Kept, Settings, Tensors


def dtn(t: Tensors, s: Settings) -> Tensor:
    """Normalises ``t.x``, B x H x W x C; gives the dtype that LayerNorm would give."""
    x, dtype = t.x, t.x.dtype
    if x.device.type == 'cuda' and torch.is_autocast_enabled('cuda') and dtype in (torch.half, torch.bfloat16):
        dtype = torch.float32  # autocast runs LayerNorm in float32 on GPUs, but in the input's dtype on CPUs
    if _wants_plain_torch(x):
        with _exact_products(x.device.type):
            return reference.dtn(t, s).to(dtype)
    if not torch.compiler.is_compiling() and type(x) in (Tensor, torch.nn.Parameter):
        _back_end(x)  # which builds or checks it, here where grad mode tells whether all processes train
    return _dtn(*t, dtype, *s)[0]


# torch's operators take no tuples with names: in their schemas the fields stand one after the other.
TENSORS, SETTINGS = len(Tensors._fields), len(Settings._fields)
_TENSORS = ', '.join(f'Tensor {name}' for name in Tensors._fields)
_SETTINGS = ', '.join(f'{kind.__name__} {name}' for name, kind in Settings.__annotations__.items())


@torch.library.custom_op(
    'mmdtn::dtn', mutates_args=(), schema=f'({_TENSORS}, ScalarType dtype, {_SETTINGS}) -> (Tensor, Tensor, Tensor)'
)
def _dtn(*arguments: Any) -> tuple[Tensor, ...]:
    """The output, and what is kept."""
    t, dtype, s = _contiguous(arguments[:TENSORS]), arguments[TENSORS], Settings(*arguments[TENSORS + 1 :])
    if (back_end := _back_end(t.x)) is not None:
        y, kept = back_end.forward(t, s, dtype)
        return y, *kept
    with _exact_products(t.x.device.type):
        y = reference.dtn(t, s)
    return y.to(dtype), *(kept.zero_() for kept in _empty_kept(t))


@_dtn.register_fake
def _(*arguments: Any) -> tuple[Tensor, ...]:
    t, dtype = Tensors(*arguments[:TENSORS]), arguments[TENSORS]
    return t.x.new_empty(t.x.shape, dtype=dtype), *_empty_kept(t)


def _empty_kept(t: Tensors) -> Kept:
    B, H, W, C = t.x.shape
    return Kept(t.weight.new_empty(B * H * W * (len(t.position) + 2)), t.weight.new_empty(B, C))


def _contiguous(tensors: Any) -> Tensors:
    return Tensors(*(tensor.contiguous() for tensor in tensors))


@torch.library.custom_op(
    'mmdtn::dtn_backward',
    mutates_args=(),
    schema=f'(Tensor grad, {_TENSORS}, Tensor of_tokens, Tensor of_channels, {_SETTINGS}) '
    f'-> ({", ".join(["Tensor"] * TENSORS)})',
)
def _dtn_backward(grad: Tensor, *arguments: Any) -> Tensors:
    """From the gradient of the output those of x and of the parameters."""
    t, kept, s = _contiguous(arguments[:TENSORS]), Kept(*arguments[TENSORS:-SETTINGS]), Settings(*arguments[-SETTINGS:])
    if (back_end := _back_end(t.x)) is not None:
        return back_end.backward(grad.contiguous(), t, kept, s)
    return _reference_gradients(grad, t, s)


@_dtn_backward.register_fake
def _(grad: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    return tuple(tensor.new_empty(tensor.shape) for tensor in arguments[:TENSORS])


def _save(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.settings = Settings(*inputs[-SETTINGS:])
    ctx.save_for_backward(*inputs[:TENSORS], *output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    no_others = (None,) * (1 + SETTINGS)
    if grad is None:
        return *(None,) * TENSORS, *no_others
    if torch.is_grad_enabled():  # create_graph=True: the gradients will be differentiated
        t = Tensors(*ctx.saved_tensors[:TENSORS])
        return *_reference_gradients(grad, t, ctx.settings), *no_others
    return *_dtn_backward(grad, *ctx.saved_tensors, *ctx.settings), *no_others


_dtn.register_autograd(_differentiate, setup_context=_save)


def _reference_gradients(grad: Tensor, t: Tensors, s: Settings) -> Tensors:
    # torch.func differentiates inside an operator too, where autograd is off.
    with _exact_products(grad.device.type):
        y, pull_back, *_ = torch.func.vjp(functools.partial(reference.dtn, s=s), t)
        return pull_back(grad.to(y.dtype))[0]


def _back_end(x: Tensor) -> ModuleType | None:
    """The fast back end for ``x``: the only place that chooses. None is the reference."""
    if os.environ.get('MMDTN_BACKEND') == 'reference' or x.dtype == torch.float64 or x.numel() == 0:
        return None
    for back_end in (dtn_cpu, dtn_triton):
        if x.device.type == back_end.DEVICE and back_end.works(x.device):
            return back_end
    return None


def is_exporting() -> bool:
    """Whether torch.export is at work. torch's own function says so in torch.compile, too, at least until torch 2.9."""
    return torch.compiler.is_compiling() and not torch.compiler.is_dynamo_compiling()


def _wants_plain_torch(x: Tensor) -> bool:
    """Elsewhere nobody knows this package's operators, and torch.func cannot look into them."""
    if torch.compiler.is_compiling():
        return is_exporting()
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
