"""Times the DTN layer beside LayerNorm, and counts what each keeps for the backward pass; on a GPU where there is one.

python tools/analysis_tools/benchmark_norm.py [--repeats 15] [--dtype float32] [--json results.json]
python tools/analysis_tools/benchmark_norm.py --count    # GPU traffic, counted without a GPU; minutes to an hour

All run in one process, so that ratios hold where times do not, on a machine that others share. Times are medians.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager

import torch
from torch import nn

from mmdtn.analysis import SavedBytes
from mmdtn.analysis.traffic import Traffic, count_dtn, count_layernorm
from mmdtn.engine.cpu import keep_freed_memory
from mmdtn.norms import DTN

# B, C, heads, height, width, pool size
SHAPES = [
    (8, 432, 9, 14, 14, 1),
    (8, 64, 4, 56, 56, 4),
    (8, 128, 4, 28, 28, 2),
    (2, 64, 4, 200, 336, 4),
    (1, 64, 4, 200, 336, 1),
    (1, 384, 12, 50, 84, 1),
    (1, 192, 6, 100, 168, 2),
]
# Counted with one image, as a further one costs what the first does; on small grids with as many as make P's bytes few.
COUNTED = [(1, 64, 4, 200, 336, 4), (1, 320, 5, 50, 84, 1), (8, 432, 9, 14, 14, 1)]
ROUNDS = 5
DEVICE = 'cuda' if torch.cuda.is_available() else 'cpu'


@contextmanager
def reference():
    os.environ['MMDTN_BACKEND'] = 'reference'
    try:
        yield
    finally:
        del os.environ['MMDTN_BACKEND']


def saved_bytes(layer: nn.Module, x: torch.Tensor) -> int:
    with SavedBytes(layer) as saved:
        _out = layer(x)  # alive while counted, so that no memory is used twice
    return saved.total


def medians(runs: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Milliseconds of each, in rounds, so that what else the machine does falls on all; each warms up in each round."""
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

    def both_ways(layer: nn.Module) -> None:  # and no more: backward() would add to the gradients of a step before
        torch.autograd.grad(layer(x), [x, *layer.parameters()], upstream)

    def in_plain_torch(run: Callable[[nn.Module], None]) -> None:
        with reference():
            run(dtn)

    def times(run: Callable[[nn.Module], None]) -> dict[str, float]:
        runs = {'DTN': lambda: run(dtn), 'LayerNorm': lambda: run(layer_norm), 'reference': lambda: in_plain_torch(run)}
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


def count() -> None:
    if os.environ.get('TRITON_INTERPRET') != '1':  # Triton reads it when the kernels are defined, which they are by now
        environment = dict(os.environ, TRITON_INTERPRET='1')
        sys.exit(subprocess.run([sys.executable, *sys.argv], env=environment).returncode)
    print('Forward + backward. Bytes are over those of the input; moved: the distinct ones of each launch.')
    print(f'{"":38}{"launches":>10}{"moved":>24}{"asked for":>18}{"temporary":>16}{"kept":>8}')
    for B, C, heads, height, width, pool in COUNTED:
        for dtype in (torch.float32, torch.float16):
            forward, backward, kept = count_dtn(B, height, width, C, heads, pool, dtype)
            name = f'{B} x {height} x {width}, {C}, {heads}, {pool}'
            print(f'{_row(name, dtype, forward, backward)}{kept:8.2f}')
            print(_row('  LayerNorm', dtype, *count_layernorm(C, B * height * width, dtype)), flush=True)


def _row(name: str, dtype: torch.dtype, forward: Traffic, backward: Traffic) -> str:
    launches, moved, asked, temporary = (f'{f:.4g} + {b:.4g}' for f, b in zip(forward, backward, strict=True))
    total = f'{moved} = {forward.moved + backward.moved:.1f}'
    return f'{name:28}{str(dtype)[6:]:10}{launches:>10}{total:>24}{asked:>18}{temporary:>16}'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--repeats', type=int, default=15)
    parser.add_argument('--dtype', choices=['float32', 'float16', 'bfloat16'], default='float32')
    parser.add_argument('--json', help='write the results to this file as well')
    parser.add_argument('--count', action='store_true', help='count launches and bytes on a GPU, without one')
    args = parser.parse_args()
    if args.count:
        count()
        return
    torch.manual_seed(0)
    keep_freed_memory()  # as tools/train.py does; or else glibc's returning it decides the ratios
    where = torch.cuda.get_device_name() if DEVICE == 'cuda' else f'{torch.get_num_threads()} threads'
    print(f'torch {torch.__version__}, {where}, {args.dtype}')
    results = []
    for shape in SHAPES:
        result = measure(shape, args.repeats, getattr(torch, args.dtype))
        results.append(result)
        B, C, heads, height, width, pool = shape
        print(f'\nbatch {B}, {C} channels, {heads} heads, {height} x {width} tokens, pool {pool}')
        print(f'{"":14}{"forward":>12}{"+ backward":>12}{"/ LayerNorm":>13}{"saved / input":>15}')
        for name, row in result['layers'].items():
            times = f'{row["forward_ms"]:9.2f} ms{row["forward_backward_ms"]:9.2f} ms'
            print(f'{name:14}{times}{row["over_layernorm"]:12.1f}x{row["saved_over_input"]:14.2f}x', flush=True)
    if args.json:
        with open(args.json, 'w') as file:
            json.dump(dict(torch=torch.__version__, where=where, results=results), file, indent=1)


if __name__ == '__main__':
    main()
