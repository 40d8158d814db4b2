"""Times DTN beside the published dense form and LayerNorm, and counts what each keeps for the backward pass.

python tools/analysis_tools/benchmark_norm.py [--repeats 15] [--json results.json]

All run in one process, so that ratios hold where times do not, on a machine that others share. Times are medians.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmdtn.analysis import SavedBytes
from mmdtn.engine.memory import keep_freed_memory
from mmdtn.norms import DTN

# B, C, heads, height, width, pool size
SHAPES = [
    (8, 432, 9, 14, 14, 1),
    (8, 64, 4, 56, 56, 4),
    (8, 128, 4, 28, 28, 2),
    (2, 64, 4, 200, 336, 4),
    (1, 64, 4, 200, 336, 1),
]
ROUNDS = 5
DENSE_LIMIT = 4 * 2**30  # bytes of the dense P, all heads and images, beyond which it is not tried


class PublishedDTN(nn.Module):
    """The published way to compute it: P over all pairs of tokens of one fixed grid, expanded over the batch."""

    def __init__(self, channels: int, heads: int, height: int, width: int, pool: int) -> None:
        super().__init__()
        self.heads, self.pool = heads, pool
        self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))
        self.mean_mix, self.var_mix = nn.Parameter(torch.zeros(heads)), nn.Parameter(torch.zeros(heads))
        self.projection = nn.Linear(3, heads)
        y, x = torch.meshgrid(torch.arange(height // pool), torch.arange(width // pool), indexing='ij')
        dx, dy = (t.flatten()[:, None] - t.flatten()[None] for t in (x, y))
        self.register_buffer('shifts', torch.stack((dx**2 + dy**2, dx, dy), -1).float())

    def forward(self, x: Tensor) -> Tensor:
        B, H, W, C = x.shape
        K, c, s = self.heads, C // self.heads, self.pool
        z = x.reshape(B, H * W, K, c)
        z = z / (z.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        flat = z.reshape(B, H * W, C)
        mean, var = (t[:, None, :, None] for t in (flat.mean(-1), flat.var(-1)))
        z = z.transpose(1, 2)
        cells = z
        if s > 1:
            pooled = F.avg_pool2d(flat.reshape(B, H, W, C).permute(0, 3, 1, 2), s)
            cells = pooled.reshape(B, K, c, -1).transpose(2, 3)
        P = self.projection(self.shifts).permute(2, 0, 1).softmax(-1)[None].expand(B, -1, -1, -1)
        M, second = P @ cells, P @ cells.square()
        V = second - M.square()
        if s > 1:
            M, V = (self._spread(t, H, W) for t in (M, V))
        l, k = (mix.sigmoid().view(1, K, 1, 1) for mix in (self.mean_mix, self.var_mix))
        z = (z - (l * mean + (1 - l) * M)) / (k * var + (1 - k) * V + 1e-5).sqrt()
        return z.transpose(1, 2).reshape(B, H, W, C) * self.weight + self.bias

    def _spread(self, cells: Tensor, H: int, W: int) -> Tensor:
        B, K, _, c = cells.shape
        image = cells.transpose(2, 3).reshape(B, K * c, H // self.pool, W // self.pool)
        return F.interpolate(image, scale_factor=self.pool).reshape(B, K, c, H * W).transpose(2, 3)


def saved_bytes(layer: nn.Module, x: Tensor) -> int:
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
                start = time.perf_counter()
                run()
                times[name].append((time.perf_counter() - start) * 1e3)
    return {name: statistics.median(t) for name, t in times.items()}


def measure(shape: tuple[int, ...], repeats: int) -> dict:
    B, C, heads, height, width, pool = shape
    x = torch.randn(B, height, width, C, requires_grad=True)
    upstream = torch.randn_like(x)
    layers: dict[str, nn.Module] = {
        'DTN eager': DTN(C, heads, pool),
        'DTN compiled': DTN(C, heads, pool, compiled=True),
        'LayerNorm': nn.LayerNorm(C),
    }
    cells = (height // pool) * (width // pool)
    if B * heads * cells**2 * 4 < DENSE_LIMIT:
        layers['published'] = PublishedDTN(C, heads, height, width, pool)

    def forward(layer: nn.Module) -> None:
        with torch.no_grad():
            layer(x)

    def both_ways(layer: nn.Module) -> None:  # and no more: backward() would add to the gradients of a step before
        torch.autograd.grad(layer(x), [x, *layer.parameters()], upstream)

    both = medians({name: lambda layer=layer: both_ways(layer) for name, layer in layers.items()}, repeats)
    alone = medians({name: lambda layer=layer: forward(layer) for name, layer in layers.items()}, repeats)
    rows = {
        name: dict(
            forward_ms=alone[name],
            forward_backward_ms=both[name],
            over_layernorm=both[name] / both['LayerNorm'],
            faster_than_published=both['published'] / both[name] if 'published' in both else None,
            saved_over_input=saved_bytes(layer, x) / (x.numel() * x.element_size()),
        )
        for name, layer in layers.items()
    }
    return dict(zip(('batch', 'channels', 'heads', 'height', 'width', 'pool'), shape, strict=True), layers=rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--repeats', type=int, default=15)
    parser.add_argument('--json', help='write the results to this file as well')
    args = parser.parse_args()
    torch.manual_seed(0)
    keep_freed_memory()  # as tools/train.py does; or else glibc's returning it decides the ratios
    print(f'torch {torch.__version__}, {torch.get_num_threads()} threads, float32')
    results = []
    for shape in SHAPES:
        result = measure(shape, args.repeats)
        results.append(result)
        B, C, heads, height, width, pool = shape
        print(f'\nbatch {B}, {C} channels, {heads} heads, {height} x {width} tokens, pool {pool}')
        print(f'{"":14}{"forward":>12}{"+ backward":>12}{"/ LayerNorm":>13}{"vs published":>14}{"saved / input":>15}')
        for name, row in result['layers'].items():
            gain = row['faster_than_published']
            times = f'{row["forward_ms"]:9.2f} ms{row["forward_backward_ms"]:9.2f} ms'
            ratios = f'{row["over_layernorm"]:12.1f}x' + (f'{gain:13.1f}x' if gain else f'{"cannot run":>14}')
            print(f'{name:14}{times}{ratios}{row["saved_over_input"]:14.2f}x')
    if args.json:
        with open(args.json, 'w') as file:
            json.dump(dict(torch=torch.__version__, threads=torch.get_num_threads(), results=results), file, indent=1)


if __name__ == '__main__':
    main()
