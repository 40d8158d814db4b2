"""Benchmarks of GPU kernels that need no GPU."""

import pytest
import torch

pytest.importorskip('triton')

from mmdtn.benchmarks import gpu_report, host
from mmdtn.benchmarks.floor import GPUS, floors, layernorm_floor
from mmdtn.benchmarks.no_gpu import Layer, no_gpu
from mmdtn.ops import Settings

POOLED = Layer(2, 40, 24, 24, 2, Settings(2))
KERNELS = ['_axes', '_statistics', '_rows', '_columns']
BACKWARD = ['_rows', '_columns_backward', '_rows_backward', '_tokens_backward', '_parameters']


@pytest.mark.slow
@pytest.mark.parametrize('batch', [2, 8])
def test_the_floor_of_a_layer(batch):
    gpu = GPUS['A100']
    kernels = floors(gpu, POOLED._replace(batch=batch))
    assert [kernel.name for kernel in kernels] == KERNELS + BACKWARD
    by_name = {kernel.name: kernel for kernel in kernels}
    x = POOLED._replace(batch=batch).tensors().x
    # The kernel reads x, and writes K + 2 numbers for each token and two maps of cells, each a quarter of x.
    assert by_name['_statistics'].moves == pytest.approx(
        x.nbytes * (1 + 4 / 24 + 2 / 4) / gpu.bandwidth * 1e6, rel=1e-3
    )
    assert by_name['_statistics'].multiplies == 0 < by_name['_rows'].multiplies
    assert all(0 < kernel.occupancy <= 1 and kernel.registers <= 255 for kernel in kernels)
    assert sum(kernel.floor for kernel in kernels) > layernorm_floor(gpu, POOLED._replace(batch=batch))


@pytest.mark.slow
def test_barriers_grow_with_the_columns_that_a_program_takes():
    few, many = (floors(GPUS['A100'], POOLED._replace(width=width))[5] for width in (24, 96))
    assert few.name == many.name == '_columns_backward'
    assert few.barriers == many.barriers, 'four columns a program, however wide the grid is'
    tall = floors(GPUS['A100'], POOLED._replace(height=80))[5]
    assert tall.barriers > few.barriers


@pytest.mark.slow
def test_host_time_is_that_of_launches_and_of_python():
    times = host.measure()
    assert list(times) == ['small', 'large', 'pooled', 'LayerNorm']
    assert all(0 < forward < both for forward, both in times.values())


@pytest.mark.slow
def test_a_report_names_each_kernel_and_what_it_uses():
    with no_gpu(80):
        lines = list(gpu_report.kernel_lines(torch.device('cpu'), (1, 5, 7, 24, 2, 2), torch.float32))
    for name in {*KERNELS, *BACKWARD}:
        assert any(line.strip().startswith(name) and 'registers' in line for line in lines), name
