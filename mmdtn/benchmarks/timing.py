"""Measures the time and the saved memory of DTN, LayerNorm and DTN in plain torch."""

import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from mmdtn.analysis import SavedBytes
from mmdtn.norms import DTN

# Layers as (batch size, channels, heads, height, width, pool size).
SHAPES = [
    (8, 432, 9, 14, 14, 1),
    (8, 64, 4, 56, 56, 4),
    (8, 128, 4, 28, 28, 2),
    (2, 64, 4, 200, 336, 4),
    (1, 64, 4, 200, 336, 1),
    (1, 384, 12, 50, 84, 1),
    (1, 192, 6, 100, 168, 2),
]
ROUNDS = 5
DEVICE = 'cuda' if torch.cuda.is_available() else 'cpu'


@contextmanager
def reference() -> Iterator[None]:
    os.environ['MMDTN_BACKEND'] = 'reference'
    try:
        yield
    finally:
        del os.environ['MMDTN_BACKEND']


def saved_bytes(layer: nn.Module, x: torch.Tensor) -> int:
    with SavedBytes(layer) as saved:
        _out = layer(x)  # the output stays alive, so no memory is counted twice
    return saved.total


def medians(runs: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Returns the median time of each function in milliseconds.

    The functions take turns, so that other load on the machine affects them all. In each round, every function first
    runs twice for warm-up.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    for a_round in range(ROUNDS):
        for name, run in runs.items():
            run(), run()
            for _ in range(a_round, repeats, ROUNDS):
                _wait()
                start = time.perf_counter()
                run()
                _wait()
                times[name].append((time.perf_counter() - start) * 1e3)
    return {name: statistics.median(t) for name, t in times.items()}


def _wait() -> None:
    if DEVICE == 'cuda':
        torch.cuda.synchronize()


def measure(shape: tuple[int, ...], repeats: int, dtype: torch.dtype) -> dict:
    B, C, heads, height, width, pool = shape
    x = torch.randn(B, height, width, C, device=DEVICE, dtype=dtype, requires_grad=True)
    upstream = torch.randn_like(x)
    dtn, layer_norm = DTN(C, heads, pool).to(DEVICE), nn.LayerNorm(C, device=DEVICE, dtype=dtype)

    def forward(layer: nn.Module) -> None:
        with torch.no_grad():
            layer(x)

    def both_ways(layer: nn.Module) -> None:  # backward() would accumulate gradients
        torch.autograd.grad(layer(x), [x, *layer.parameters()], upstream)

    def in_plain_torch(run: Callable[[nn.Module], None]) -> None:
        with reference():
            run(dtn)

    def times(run: Callable[[nn.Module], None]) -> dict[str, float]:
        runs: dict[str, Callable[[], object]] = {
            'DTN': lambda: run(dtn),
            'LayerNorm': lambda: run(layer_norm),
            'reference': lambda: in_plain_torch(run),
        }
        return medians(runs, repeats)

    both, alone = times(both_ways), times(forward)
    saved = {'DTN': saved_bytes(dtn, x), 'LayerNorm': saved_bytes(layer_norm, x)}
    with reference():
        saved['reference'] = saved_bytes(dtn, x)
    rows = {
        name: dict(
            forward_ms=alone[name],
            forward_backward_ms=both[name],
            over_layernorm=both[name] / both['LayerNorm'],
            saved_over_input=saved[name] / x.nbytes,
        )
        for name in both
    }
    return dict(zip(('batch', 'channels', 'heads', 'height', 'width', 'pool'), shape, strict=True), layers=rows)
