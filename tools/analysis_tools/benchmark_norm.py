"""Compares the time of the DTN layer with that of LayerNorm, and measures the cost of its GPU kernels.

Times are medians. All measurements run in one process, so that ratios are reliable while other processes use the
machine. The following options need no GPU:

--host   measures the host time of a layer, in seconds
--floor  computes barriers, registers, occupancy and minimum times of the kernels, in a minute
--count  counts bytes and launches of the kernels, in minutes

Example:
    python tools/analysis_tools/benchmark_norm.py --repeats 15 --dtype float32 --json results.json
"""

import argparse
import json
import os
import subprocess
import sys

import torch

from mmdtn.benchmarks.timing import DEVICE, SHAPES, measure
from mmdtn.engine.cpu import keep_freed_memory
from mmdtn.errors import readable_errors
from mmdtn.ops import Settings

# The tool computes minimum times for these layers: (batch size, channels, heads, height, width, pool size).
TABLE = [(128, 432, 9, 14, 14, 1), (128, 64, 4, 56, 56, 4), (2, 64, 4, 200, 336, 4), (2, 320, 5, 50, 84, 1)]
# Small grids are enough, because the ratio of counted bytes to input bytes hardly depends on the size.
COUNTED = [(1, 64, 4, 24, 24, 4), (1, 64, 1, 17, 32, 1), (2, 432, 9, 14, 14, 1)]


def count() -> None:
    if os.environ.get('TRITON_INTERPRET') != '1':  # Triton reads this when defining kernels, so a restart is needed
        environment = dict(os.environ, TRITON_INTERPRET='1')
        sys.exit(subprocess.run([sys.executable, *sys.argv], env=environment).returncode)
    from mmdtn.benchmarks.traffic import Traffic, count_dtn, count_layernorm, count_residual

    def row(name: str, dtype: torch.dtype, forward: Traffic, backward: Traffic) -> str:
        launches, moved, asked, temporary = (f'{f:.4g} + {b:.4g}' for f, b in zip(forward, backward, strict=True))
        total = f'{moved} = {forward.moved + backward.moved:.1f}'
        return f'{name:28}{str(dtype)[6:]:10}{launches:>10}{total:>24}{asked:>18}{temporary:>16}'

    print('Drop path, residual sum, norm and casts under autocast, 2 x 56 x 56, 64, 4, 4: bytes relative to the input')
    for name, moved in count_residual(2, 56, 56, 64, 4, 4).items():
        print(f'{name:38}{moved:6.1f}', flush=True)
    print('Forward + backward. Bytes are relative to the input; "moved" has the distinct bytes of each launch.')
    print(f'{"":38}{"launches":>10}{"moved":>24}{"asked for":>18}{"temporary":>16}{"saved":>8}')
    for B, C, heads, height, width, pool in COUNTED:
        for dtype in (torch.float32, torch.float16):
            forward, backward, saved = count_dtn(B, height, width, C, heads, pool, dtype)
            name = f'{B} x {height} x {width}, {C}, {heads}, {pool}'
            print(f'{row(name, dtype, forward, backward)}{saved:8.2f}')
            print(row('  LayerNorm', dtype, *count_layernorm(C, B * height * width, dtype)), flush=True)


def print_host_times() -> None:
    from mmdtn.benchmarks import host

    torch.set_num_threads(1)
    device = torch.cuda.get_device_name() if DEVICE == 'cuda' else 'a driver that does nothing'
    print(f'Microseconds of the host, on {device}')
    print(f'{"":12}{"forward":>10}{"+ backward":>12}')
    for name, (forward, both) in host.measure().items():
        print(f'{name:12}{forward:10.0f}{both:12.0f}')


def print_least_times() -> None:
    from mmdtn.benchmarks.floor import print_floors
    from mmdtn.benchmarks.no_gpu import Layer

    layers = [Layer(B, height, width, C, heads, Settings(pool)) for B, C, heads, height, width, pool in TABLE]
    print_floors(['A100', 'H100'], layers)


def run(args: argparse.Namespace) -> None:
    for wanted, run in ((args.host, print_host_times), (args.floor, print_least_times), (args.count, count)):
        if wanted:
            run()
            return
    torch.manual_seed(0)
    keep_freed_memory()  # as in tools/train.py; without it, memory allocation dominates the ratios
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--repeats', type=int, default=15)
    parser.add_argument('--dtype', choices=['float32', 'float16', 'bfloat16'], default='float32')
    parser.add_argument('--json', help='write the results to this file as well')
    parser.add_argument('--host', action='store_true', help='measure only the host time')
    parser.add_argument('--floor', action='store_true', help='compute the minimum times of the GPU kernels')
    parser.add_argument('--count', action='store_true', help='count launches and bytes of the GPU kernels')
    parser.add_argument('--debug', action='store_true', help='show the traceback of every error')
    args = parser.parse_args()
    with readable_errors(args.debug):
        run(args)


if __name__ == '__main__':
    main()
