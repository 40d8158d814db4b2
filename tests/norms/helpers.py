"""Training steps of one layer, here and in two processes."""

import copy
import tempfile
from pathlib import Path

import torch
import torch.multiprocessing as mp
from torch import Tensor, nn


def random_steps(count: int, shape: tuple[int, ...], seed: int = 0, dtype: torch.dtype = torch.float64) -> list:
    """Inputs with the gradients of the outputs; channels have scales and offsets of their own, and scales wander."""
    generator = torch.Generator().manual_seed(seed)
    scale, offset = (torch.randn(shape[-1], generator=generator, dtype=dtype) for _ in range(2))
    steps = []
    for i in range(count):
        x, g = (torch.randn(shape, generator=generator, dtype=dtype) for _ in range(2))
        steps.append((x * (1 + i / count) * (scale.abs() + 0.5) + 0.3 * offset, g))
    return steps


def run_steps(norm: nn.Module, steps: list) -> list[Tensor]:
    """Of each step the output, and the gradients of the input and of all parameters. No optimizer moves."""
    results = []
    norm.train()
    for x, g in steps:
        x = x.to(next(norm.parameters()).dtype, copy=True).requires_grad_()
        norm.zero_grad()
        y = norm(x)
        y.backward(g.to(y.dtype))
        results += [y.detach(), x.grad, *(p.grad.clone() for p in norm.parameters())]
    return results


def in_two_processes(norms: dict[str, nn.Module], halves: list[list]) -> list[dict]:
    """What ``run_steps`` gives each process for its half, with the state after it."""
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_process, (folder, norms, halves), nprocs=2, start_method='fork')  # nothing to import again
        return [torch.load(Path(folder) / f'{rank}.pt') for rank in range(2)]


def _process(rank: int, folder: str, norms: dict[str, nn.Module], halves: list[list]) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group('gloo', f'file://{folder}/meet', rank=rank, world_size=2)
    norms = copy.deepcopy(norms)  # what comes in lies in memory that both processes share
    found = {name: (run_steps(norm, halves[rank]), norm.state_dict()) for name, norm in norms.items()}
    torch.save(found, Path(folder) / f'{rank}.pt')
    torch.distributed.destroy_process_group()
