"""Reports times and registers of the DTN kernels on a GPU, and compares the layers with LayerNorm."""

from collections.abc import Iterator
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from mmdtn.ops import Settings, Tensors, dtn_triton

from . import host, timing

RUNS = 20
# Layers of ViT-S* and of PVT-Tiny on ImageNet and COCO, as (batch size, height, width, channels, heads, pool size).
LAYERS = [(128, 56, 56, 64, 4, 4), (2, 200, 336, 64, 4, 4), (2, 50, 84, 320, 5, 1), (128, 14, 14, 432, 9, 1)]


def report(device: torch.device) -> Iterator[str]:
    """Yields the lines of the report."""
    for layer in LAYERS:
        for dtype in (torch.float32, torch.float16):
            yield from kernel_lines(device, layer, dtype)
    yield 'Times of a layer'
    for shape in timing.SHAPES:
        for name, row in timing.measure(shape, repeats=15, dtype=torch.float32)['layers'].items():
            yield f'  {shape} {name:10} {row["forward_backward_ms"]:8.3f} ms, {row["over_layernorm"]:6.2f}x LayerNorm'
    yield 'Host time of a layer in a training step'
    for name, (_, both) in host.measure().items():
        yield f'  {name:10} {both:6.0f} us'


def kernel_lines(device: torch.device, layer: tuple[int, ...], dtype: torch.dtype) -> Iterator[str]:
    """Yields one line for each kernel in a forward and a backward pass."""
    B, H, W, C, K, pool_size = layer
    s, x = Settings(pool_size), torch.randn(B, H, W, C, device=device, dtype=dtype)
    weight, mix = torch.ones(C, device=device), torch.full((K,), 0.5, device=device)
    t = Tensors(x, weight, weight.clone(), mix, mix.clone(), torch.randn(K, 3, device=device) / 4)

    def step() -> None:
        y, kept = dtn_triton.forward(t, s, dtype)
        dtn_triton.backward(y, t, kept, s)

    times = _microseconds(step)
    yield f'Kernels of {layer}, {str(dtype)[6:]}'
    for name, kernel in dtn_triton.compiled_kernels(t, s, dtype).items():
        time = f'{times[name]:8.1f} us' if name in times else '  no time'
        uses = f'{kernel.n_regs} registers, {kernel.n_spills} spilled, {kernel.metadata.shared} bytes shared'
        yield f'  {name:20}{time}, {kernel.metadata.num_warps} warps, {uses}'


def _microseconds(step: Any) -> dict[str, float]:
    """Returns the time in microseconds that each kernel takes in one step."""
    step()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(RUNS):
            step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    return {event.key: event.device_time_total / RUNS for event in profiler.key_averages() if event.device_time_total}
