"""Computes lower bounds for the time of each GPU kernel from its machine code, without a GPU.

A kernel takes at least as long as each of the following:

- reading and writing its tensors once
- issuing its instructions, one per cycle on each of the four schedulers of a multiprocessor
- computing its products on the tensor cores
- exchanging its values through shared memory
- running one program alone

The machine code shows the loops, and the sizes determine their trip counts. Latency, caches and imbalance make kernels
slower than these bounds, so real times require a measurement on a GPU.
"""

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor

from .no_gpu import Binary, Launch, Layer, launches

SCHEDULERS = 4  # schedulers of a multiprocessor, each with one tensor core
MMA_CYCLES = 8  # cycles of one HMMA.1688.F32.TF32 instruction on one tensor core
REGISTERS, THREADS, PROGRAMS = 65536, 2048, 32  # resources of a multiprocessor


class Gpu(NamedTuple):
    arch: int
    multiprocessors: int
    clock: float  # Hz
    bandwidth: float  # bytes per second
    shared_memory: int  # bytes per multiprocessor


GPUS = dict(A100=Gpu(80, 108, 1.41e9, 1.94e12, 164 << 10), H100=Gpu(90, 132, 1.755e9, 3.35e12, 228 << 10))

# Tensors that each kernel reads or writes. A tensor appears twice if the kernel does both.
TOUCHED = {
    '_axes': 'P moments',
    '_statistics': 'x of_tokens cells',
    '_grid': 'x of_tokens P y',
    '_rows': 'cells P rows',
    '_columns': 'rows P x of_tokens y',
    '_grid_backward': 'x of_tokens P of_y of_uv of_partial_tokens',
    '_columns_backward': 'rows rows P x of_tokens of_y of_partial_tokens stored_moments',
    '_rows_backward': 'cells P rows of_uv',
    '_tokens_backward': 'x of_tokens of_partial_tokens pooled_gradient of_uv of_x',
    '_parameters': 'weight_parts bias_parts records',
}


class Kernel(NamedTuple):
    """Resource usage of a kernel launch, and lower bounds in microseconds for its time."""

    name: str
    programs: int
    barriers: int  # barriers that one program executes
    registers: int
    occupancy: float  # share of a multiprocessor's threads in use
    moves: float
    issues: float
    multiplies: float
    exchanges: float
    alone: float

    @property
    def floor(self) -> float:
        return max(self[5:])


def floors(gpu: Gpu, layer: Layer) -> list[Kernel]:
    """Returns lower bounds for all launches in a forward and a backward pass."""
    return [_kernel(gpu, layer, launch) for launch in launches(gpu.arch, layer)]


def layernorm_floor(gpu: Gpu, layer: Layer) -> float:
    """Returns a lower bound in microseconds for LayerNorm's forward and backward pass.

    Memory traffic limits LayerNorm, which moves five times the bytes of its input.
    """
    x = layer.tensors().x
    return 5 * x.nbytes / gpu.bandwidth * 1e6


def _kernel(gpu: Gpu, layer: Layer, launch: Launch) -> Kernel:
    code = Binary(launch.binary)
    runs = _counts(code.sass, _trip_counts(layer, launch))
    programs = launch.grid[0] * launch.grid[1] * launch.grid[2]
    seconds = launch.warps / gpu.multiprocessors / gpu.clock * 1e6  # microseconds for one cycle of all warps
    resident = min(
        REGISTERS // (code.usage['REG'] * launch.warps * 32),
        gpu.shared_memory // (launch.shared + 1024),
        THREADS // (launch.warps * 32),
        PROGRAMS,
    )
    return Kernel(
        launch.name,
        programs,
        runs['BAR'],
        code.usage['REG'],
        resident * launch.warps * 32 / THREADS,
        sum(tensor.nbytes for tensor in _touched(launch)) / gpu.bandwidth * 1e6,
        runs['all'] * programs * seconds / SCHEDULERS,
        runs['HMMA'] * MMA_CYCLES * programs * seconds / SCHEDULERS,
        runs['shared'] * programs * seconds,
        runs['all'] * launch.warps / SCHEDULERS / gpu.clock * 1e6,
    )


def _touched(launch: Launch) -> Iterator[Tensor]:
    memory, *rest = launch.arguments
    others: dict[str, Any] = {}
    for argument in (memory, *rest):
        if hasattr(argument, '_asdict') and not hasattr(argument, 'C'):
            fields = argument._asdict()
            if 'of_uv' in fields:
                fields['of_partial_tokens'] = fields.pop('of_tokens')
                pooled = fields.pop('moments')
                fields['stored_moments'] = pooled or fields['of_uv']
                fields['pooled_gradient'] = (fields['of_y'], pooled) if pooled else ()
            others |= fields
    if launch.name in ('_grid', '_columns'):
        others['y'] = rest[0]
    for name in TOUCHED[launch.name].split():
        yield from {id(tensor): tensor for tensor in _tensors(others[name])}.values()


def _tensors(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else [tensor for part in value for tensor in _tensors(part)]


def _trip_counts(layer: Layer, launch: Launch) -> dict[int, list[int]]:
    """Returns the trip counts of all loops in the code, in order.

    The keys are numbers of loops, because a compiler may merge loops.
    """
    S = layer.settings.pool_size
    h, w, K = -(-layer.height // S), -(-layer.width // S), layer.heads
    down, along = -(-h // 16), -(-w // 16)
    constants = next(value for value in launch.arguments if hasattr(value, 'C'))
    tile, of_head = constants.tile.value, constants.blocks.value // K
    tokens = [S * S] * (S > 1)
    orders = {
        '_statistics': [[S * S, K, K, S * S], [S * S, K, K * S * S], [K]] if S > 1 else [[K]],
        '_rows': [[along]],
        '_columns': [[down, *tokens]],
        '_columns_backward': [[-(-w // launch.grid[1]), down, down, *tokens, down]],
        '_rows_backward': [[-(-w // 32)]],
        '_tokens_backward': [[K]],
    }.get(launch.name, [[]])
    if launch.name == '_parameters':
        _, parts, records, _ = launch.arguments
        orders = [[-(-parts // tile), -(-records * of_head // 256)]]
    return {len(order): order for order in orders}


def _counts(sass: str, trip_counts: dict[int, list[int]]) -> dict[str, int]:
    """Counts the instructions of each kind that one warp executes."""
    instructions: list[str] = []
    labels: dict[str, int] = {}
    branches: list[tuple[str, int]] = []
    for line in sass.splitlines():
        label = re.match(r'(\.L_\w+):', line.strip())
        match = re.match(r'\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)(.*?);', line)
        if label:
            labels[label[1]] = len(instructions)
        elif match:
            if jump := re.search(r'`\((\.L_\w+)\)', match[2]):
                branches.append((jump[1], len(instructions)))
            instructions.append(match[1])
    ends: dict[int, int] = {}  # maps the start of each loop to its last backward branch
    for target, at in branches:
        if labels.get(target, at) <= at - 20 and instructions[at].startswith('BRA'):
            ends[labels[target]] = max(at, ends.get(labels[target], 0))
    loops = sorted(ends.items())
    if len(loops) not in trip_counts:
        raise RuntimeError(f'The code has {len(loops)} loops, but expected one of {sorted(trip_counts)}.')
    counts = dict.fromkeys(('all', 'BAR', 'HMMA', 'shared'), 0)
    for i, instruction in enumerate(instructions):
        times = 1
        for (first, last), trips in zip(loops, trip_counts[len(loops)], strict=True):
            times *= trips if first <= i <= last else 1
        kind = instruction.split('.')[0]
        counts['all'] += times
        if kind in ('BAR', 'HMMA'):
            counts[kind] += times
        elif kind in ('LDS', 'STS', 'LDSM'):
            counts['shared'] += times * {'64': 2, '128': 4}.get(instruction.rsplit('.', 1)[-1], 1)
    return counts


def print_floors(names: list[str], layers: list[Layer]) -> None:
    for name in names:
        for layer in layers:
            kernels = floors(GPUS[name], layer)
            dtype = str(layer.dtypes[0])[6:]
            print(f'\n{name}, {" x ".join(map(str, layer[:5]))}, pool {layer.settings.pool_size}, {dtype}')
            print(f'{"":20}{"programs":>9}{"barriers":>9}{"registers":>10}{"occupancy":>10}', end='')
            print(f'{"bytes":>9}{"issue":>8}{"tensor":>8}{"shared":>8}{"alone":>8}{"floor":>8} us')
            for k in kernels:
                numbers = ''.join(f'{number:8.1f}' for number in (*k[6:], k.floor))
                print(
                    f'{k.name:20}{k.programs:9}{k.barriers:9}{k.registers:10}{k.occupancy:10.0%}{k.moves:9.1f}{numbers}'
                )
            total, layernorm = sum(k.floor for k in kernels), layernorm_floor(GPUS[name], layer)
            moved = sum(k.moves for k in kernels) / layernorm
            print(
                f'floor {total:.0f} us; over LayerNorm: bytes {moved:.1f}x, floor {total / layernorm:.1f}x', flush=True
            )
