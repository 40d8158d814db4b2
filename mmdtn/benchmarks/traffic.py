"""Counts the memory traffic and the launches of DTN's GPU kernels without a GPU.

Triton's interpreter counts the distinct bytes that each launch of a Triton kernel reads and writes. For operators of
torch, the bytes of inputs and outputs count. Views cost nothing.
"""

import os
from collections import Counter as Counts
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mmdtn.ops import Settings, Tensors, dtn_triton

PAGE = 2**22


class Traffic(NamedTuple):
    """Traffic of the forward or the backward pass. The unit of bytes is the size of the input."""

    launches: int
    moved: float  # sum of the distinct bytes of each launch
    asked: float  # bytes of all loads and stores, some of which are cached
    temporary: float  # bytes of intermediate tensors if none is freed early


class Counter(TorchDispatchMode):
    """Context manager that counts launches and bytes.

    Counting Triton kernels requires ``TRITON_INTERPRET=1``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.launches, self.moved, self.asked, self.allocated = 0, 0, 0, 0
        self.seen: dict[tuple[str, int], np.ndarray] = {}  # addresses that were read or written, in pages

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if func.is_view or name in ('set_', 'copy_'):  # the interpreter itself calls set_ and copy_
            return result
        outputs = _bytes(result)
        self.allocated += outputs
        if not name.removeprefix('new_').startswith('empty'):
            self.launches += 1
            self.moved += outputs + _bytes(args)
            self.asked += outputs + _bytes(args)
        return result

    def launch(self) -> None:
        """Ends the previous launch and begins a new one."""
        self.moved += sum(int(page.sum()) for page in self.seen.values())
        self.seen = {}

    def access(self, kind: str, pointers: Any, mask: Any) -> None:
        size = pointers.get_element_ty().primitive_bitwidth // 8
        addresses = np.broadcast_to(pointers.data, mask.data.shape)[mask.data.astype(bool)]
        self.asked += addresses.size * size
        if addresses.size:
            for page in range(int(addresses.min()) // PAGE, int(addresses.max()) // PAGE + 1):
                seen = self.seen.setdefault((kind, page), np.zeros(PAGE, np.uint8))
                seen[addresses[addresses // PAGE == page] % PAGE] = size  # stored at the first byte of each element

    def __enter__(self) -> 'Counter':
        self._interpreter = _interpreted(self)
        self._interpreter.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._interpreter.__exit__(*error)
        self.launch()


@contextmanager
def _interpreted(counter: Counter) -> Iterator[None]:
    from triton.runtime.interpreter import interpreter_builder as builder

    load, store, grid = builder.create_masked_load, builder.create_masked_store, builder.set_grid_dim

    def count_load(pointers: Any, mask: Any, *rest: Any) -> Any:
        counter.access('read', pointers, mask)
        return load(pointers, mask, *rest)

    def count_store(pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        counter.access('written', pointers, mask)
        return store(pointers, value, mask, *rest)

    def count_launch(*sizes: int) -> None:
        counter.launch()
        counter.launches += 1
        grid(*sizes)

    # The interpreter has no hooks. All memory accesses go through its builder, of which a process has only one.
    builder.create_masked_load, builder.create_masked_store, builder.set_grid_dim = (
        count_load,
        count_store,
        count_launch,
    )
    try:
        yield
    finally:
        del builder.create_masked_load, builder.create_masked_store, builder.set_grid_dim


def _bytes(values: Any) -> int:
    return sum(t.nbytes for t in tree_leaves(values) if isinstance(t, Tensor))


def count_dtn(
    batch: int, height: int, width: int, channels: int, heads: int, pool_size: int, dtype: torch.dtype
) -> tuple[Traffic, Traffic, float]:
    """Counts the traffic of a layer with learned lambdas in both passes, and the bytes saved in between."""
    if os.environ.get('TRITON_INTERPRET') != '1' or dtn_triton.triton is None:
        raise RuntimeError("Counting needs Triton's interpreter: install triton, and set TRITON_INTERPRET=1.")
    return _count_dtn(torch.randn(batch, height, width, channels).to(dtype), heads, Settings(pool_size), dtype)


def _count_dtn(x: Tensor, heads: int, settings: Settings, out: torch.dtype) -> tuple[Traffic, Traffic, float]:
    channels = x.shape[-1]
    weight, bias, position = torch.ones(channels), torch.zeros(channels), torch.randn(heads, 3) / 10
    mixes = [torch.zeros(heads, requires_grad=True) for _ in range(2)]
    with Counter() as forward:
        mean_lambda, var_lambda = (mix.sigmoid() for mix in mixes)
        t = Tensors(x, weight, bias, mean_lambda.detach(), var_lambda.detach(), position)
        y, kept = dtn_triton.forward(t, settings, out)
    with Counter() as backward:
        gradients = dtn_triton.backward(y, t, kept, settings)
        torch.autograd.grad((mean_lambda, var_lambda), mixes, (gradients.mean_lambda, gradients.var_lambda))
    unit = x.nbytes
    return (
        _over(unit, forward, _bytes((y, kept))),
        _over(unit, backward, _bytes(gradients)),
        (unit + _bytes(kept)) / unit,
    )


def count_residual(batch: int, height: int, width: int, channels: int, heads: int, pool_size: int) -> dict[str, float]:
    """Counts the bytes, relative to the input, that a norm and nearby operators move under float16 autocast.

    Nearby operators are drop path, the residual sum, and the casts in front of the next linear layer.
    """
    half, full = torch.float16, torch.float32
    x, upstream = (torch.randn(batch, height, width, channels) for _ in range(2))
    branch, mask, weight = upstream.half(), torch.ones(batch, 1, 1, 1, dtype=half), torch.ones(channels)
    x.requires_grad_(), branch.requires_grad_()
    moved = {
        out: sum(direction.moved for direction in _count_dtn(x.detach(), heads, Settings(pool_size), out)[:2])
        for out in (half, full)
    }

    def count(run: Callable[[], Any]) -> float:
        with Counter() as counter:
            run()
        return counter.moved / x.nbytes

    def layernorm() -> None:
        _, mean, rstd = torch.ops.aten.native_layer_norm(upstream, [channels], weight, weight, 1e-5)
        torch.ops.aten.native_layer_norm_backward(
            upstream, upstream, [channels], mean, rstd, weight, weight, [True] * 3
        )

    casts = count(upstream.half) + count(branch.detach().float)  # casts of the output and of its gradient
    both = count(lambda: upstream + upstream)  # adds the gradients of the residual stream and the norm
    apart = both + count(lambda: torch.autograd.grad(x + branch * mask, (x, branch), upstream))
    fused = both + count(lambda: torch.autograd.grad(torch.addcmul(x, branch, mask), (x, branch), upstream))
    return {
        'LayerNorm': apart + count(layernorm) + casts,
        'DTN in float32, drop path apart': apart + moved[full] + casts,
        'DTN in float32, drop path fused': fused + moved[full] + casts,
        'DTN in float16, drop path apart': apart + moved[half],
        'DTN in float16, drop path fused': fused + moved[half],
    }


def count_layernorm(channels: int, tokens: int, dtype: torch.dtype) -> tuple[Traffic, Traffic]:
    x, weight, bias = torch.randn(tokens, channels).to(dtype), *(torch.ones(channels, dtype=dtype) for _ in range(2))
    with Counter() as forward:
        y, mean, rstd = torch.ops.aten.native_layer_norm(x, [channels], weight, bias, 1e-5)
    with Counter() as backward:
        torch.ops.aten.native_layer_norm_backward(y, x, [channels], mean, rstd, weight, bias, [True] * 3)
    return _over(x.nbytes, forward, forward.allocated), _over(x.nbytes, backward, backward.allocated)


def _over(unit: int, counter: Counter, returned: int) -> Traffic:
    return Traffic(counter.launches, counter.moved / unit, counter.asked / unit, (counter.allocated - returned) / unit)


def count_backbone(build: Callable[[], nn.Module], shape: tuple[int, ...]) -> tuple[int, int]:
    """Counts the launches and bytes of a forward pass on ``B x 3 x H x W`` images.

    Operators of torch run on fake CUDA tensors, and DTN layers are counted separately.
    """
    layers: list[tuple[Any, ...]] = []

    class ModelCounter(Counter):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.mmdtn.dtn.default:
                x, *_, position, dtype, pool_size = args[:8]
                layers.append((*x.shape[1:], len(position), pool_size, dtype, x.nbytes))
                return func(*args, **(kwargs or {}))
            return super().__torch_dispatch__(func, types, args, kwargs)

    model = build()
    model.eval()  # eval() returns None in MMDetection's Swin
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    with FakeTensorMode(), torch.device('cuda'), torch.no_grad():
        state = {name: torch.empty(t.shape, dtype=t.dtype) for name, t in tensors.items()}
        images = torch.empty(shape)
        with ModelCounter() as counter:
            torch.func.functional_call(model, state, (images,))
    launches, moved = counter.launches, counter.moved
    for (H, W, C, heads, pool_size, dtype, nbytes), times in Counts(layers).items():
        forward, _, _ = count_dtn(1, H, W, C, heads, pool_size, dtype)  # every image costs the same
        launches += times * forward.launches
        moved += times * int(forward.moved * nbytes)
    return launches, moved
