"""The Triton kernels under the sanitizer, which has to find a planted fault of each kind."""

import pytest
import torch

from mmdtn.ops import Settings, dtn_triton
from mmdtn.ops.triton_launch import Launcher

from .interpreted import INTERPRETED, run_interpreted, tensors

triton = pytest.importorskip('triton')
import triton.language as tl  # noqa: E402
from triton.runtime.interpreter import InterpretedFunction  # noqa: E402

from .sanitizer import (  # noqa: E402
    BOTH_WRITE,
    LANES_DISAGREE,
    ORDER_MATTERS,
    ORDERS,
    OUTSIDE,
    READ_TOO_EARLY,
    READS_OTHERS,
    REPLACES_OTHERS,
    UNDEFINED,
    UNWRITTEN,
    WRITTEN_TOO_EARLY,
    WRITTEN_TWICE,
    Sanitizer,
    sanitize,
)

# H, W, C, heads, settings. Together these layers run every kernel and every branch in them.
TINY = (2, 3, 6, 1, Settings(identity=True))
SMALL = (4, 6, 40, 2, Settings())
LARGE = (17, 2, 6, 1, Settings())
POOLED = (3, 3, 6, 2, Settings(2))
TALL = (33, 3, 6, 1, Settings(2))  # 17 cells in a column
LAYERS = [
    TINY,
    SMALL,
    LARGE,
    POOLED,
    TALL,
    (1, 33, 6, 1, Settings(prenorm=False, unbiased=True)),
    (3, 3, 66, 1, Settings(2)),
    (5, 3, 6, 1, Settings(4, prenorm=False, pool_second_moment=False)),
    (33, 2, 6, 1, Settings(2, pool_second_moment=False)),
]
CASES = [*((layer, torch.float32) for layer in LAYERS), (TINY, torch.float16), (TINY, torch.bfloat16)]


# Each kernel below has one fault, unless it is MENDED.


@triton.jit
def programs_write_one_address(x, y, MENDED: tl.constexpr):
    tl.store(x + MENDED * tl.program_id(0), 1.0)


@triton.jit
def program_reads_what_another_writes(x, y, MENDED: tl.constexpr):
    program = tl.program_id(0)
    tl.store(x + program, 1.0)
    tl.store(y + program, tl.load(x + (2 + program if MENDED else 1 - program)))


@triton.jit
def program_replaces_what_both_read(x, y, MENDED: tl.constexpr):
    value = tl.load(x)
    tl.debug_barrier()
    tl.store(x + 2 * MENDED, value, mask=tl.program_id(0) == 1)


@triton.jit
def lanes_disagree(x, y, MENDED: tl.constexpr):
    lane = tl.arange(0, 16)
    tl.store(x + tl.program_id(0) * 16 + lane // 2, lane // 2 if MENDED else lane)


@triton.jit
def reads_too_early(x, y, MENDED: tl.constexpr):
    lane = tl.program_id(0) * 16 + tl.arange(0, 16)
    tl.store(x + lane, 2.0)
    if MENDED:
        tl.debug_barrier()
    tl.store(y + lane, tl.load(x + lane))


@triton.jit
def writes_what_another_lane_reads(x, y, MENDED: tl.constexpr):
    lane, begin = tl.arange(0, 16), tl.program_id(0) * 16
    value = tl.load(x + begin + 15 - lane) + tl.load(x + begin + lane)
    if MENDED:
        tl.debug_barrier()
    tl.store(x + begin + lane, value)


@triton.jit
def writes_what_two_lanes_read(x, y, MENDED: tl.constexpr):
    lane = tl.arange(0, 16)
    at = x + tl.program_id(0) * 16 + lane // 2
    value = tl.load(at)
    if MENDED:
        tl.debug_barrier()
    tl.store(at, value, mask=lane % 2 == 1)


@triton.jit
def writes_a_tile_of_another_shape(x, y, MENDED: tl.constexpr):
    begin = tl.program_id(0) * 16
    tile = begin + tl.arange(0, 4)[:, None] * 4 + tl.arange(0, 4)
    tl.store(y + tile, tl.load(x + tile))
    if MENDED:
        tl.debug_barrier()
    tl.store(x + begin + tl.arange(0, 16), 2.0)


@triton.jit
def writes_what_a_sum_needs(x, y, MENDED: tl.constexpr):
    own = x + tl.program_id(0) * 16 + tl.arange(0, 16)
    total = tl.sum(tl.load(own), 0)
    if MENDED:
        tl.debug_barrier()
    tl.store(own, total)


@triton.jit
def writes_what_a_product_needs(x, y, MENDED: tl.constexpr):
    own = x + tl.program_id(0) * 256 + tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)
    tile = tl.load(own)
    product = tl.dot(tile, tile)
    if MENDED:
        tl.debug_barrier()
    tl.store(own, product)


@triton.jit
def writes_what_a_transposed_tile_needs(x, y, MENDED: tl.constexpr):
    own = x + tl.program_id(0) * 256 + tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)
    transposed = tl.trans(tl.load(own))
    if MENDED:
        tl.debug_barrier()
    tl.store(own, transposed)


@triton.jit
def writes_what_a_reshaped_tile_needs(x, y, MENDED: tl.constexpr):
    lane, begin = tl.arange(0, 16), tl.program_id(0) * 16
    reshaped = tl.reshape(tl.load(x + begin + lane), (4, 4))
    if MENDED:
        tl.debug_barrier()
    tl.store(x + begin + lane, 2.0)
    tl.store(y + begin + tl.arange(0, 4)[:, None] * 4 + tl.arange(0, 4), reshaped)


@triton.jit
def writes_what_lanes_gather(x, y, MENDED: tl.constexpr):
    lane = tl.arange(0, 16)
    own = x + tl.program_id(0) * 16 + lane
    gathered = tl.gather(tl.load(own), 15 - lane, 0)
    if MENDED:
        tl.debug_barrier()
    tl.store(own, gathered)


@triton.jit
def writes_twice(x, y, MENDED: tl.constexpr):
    lane, begin = tl.arange(0, 16), tl.program_id(0) * 16
    tl.store(x + begin + lane, 1.0)
    if MENDED:
        tl.debug_barrier()
    tl.store(x + begin + 15 - lane, 2.0)


@triton.jit
def reads_outside(x, y, MENDED: tl.constexpr):
    program = tl.program_id(0)
    tl.store(y + program, tl.load(x - 1 + program, mask=program >= MENDED, other=0.0))


@triton.jit
def writes_outside(x, y, MENDED: tl.constexpr):
    tl.store(x + 511 + tl.program_id(0), 1.0, mask=tl.program_id(0) < 2 - MENDED)


@triton.jit
def reads_unwritten_memory(x, y, MENDED: tl.constexpr):
    value = tl.load((x if MENDED else y) + tl.program_id(0))
    tl.store(x + tl.program_id(0), tl.where(value == value, value, 0.0))


@triton.jit
def stores_undefined_lanes(x, y, MENDED: tl.constexpr):
    lane = tl.arange(0, 16)
    value = tl.load(x + tl.program_id(0) * 16 + lane, mask=lane < 8)
    tl.store(y + tl.program_id(0) * 16 + lane, value * 0, mask=lane < (8 if MENDED else 9))


@triton.jit
def takes_the_next_number(x, y, MENDED: tl.constexpr):
    number = tl.atomic_add(x, 1.0)
    tl.store(y + tl.program_id(0), 0.0 if MENDED else number)


@triton.jit
def each_lane_updates_its_own_element(x, y, MENDED: tl.constexpr):
    own = x + tl.program_id(0) * 16 + tl.arange(0, 16)
    tl.store(own, 2 * tl.load(own) + tl.load(own))


def run_layer(H, W, C, K, s, dtype=torch.float32, orders=ORDERS):
    """Results and findings of the forward and backward pass of a layer on two images."""
    grad, inputs = tensors(2, H, W, C, K, dtype)

    def forward_and_backward(grad, inputs):
        y, kept = dtn_triton.forward(inputs, s, dtype)
        return y, *dtn_triton.backward(grad, inputs, kept, s)

    return sanitize(forward_and_backward, grad, inputs, orders=orders)


def found(findings, kernel=None):
    """The kinds of findings in a kernel, or in all of them."""
    return {finding.kind for finding in findings if kernel in (None, finding.kernel)}


FAULTS = {
    programs_write_one_address: {BOTH_WRITE},
    program_reads_what_another_writes: {READS_OTHERS, REPLACES_OTHERS},
    program_replaces_what_both_read: {READS_OTHERS, REPLACES_OTHERS},
    lanes_disagree: {LANES_DISAGREE},
    reads_too_early: {READ_TOO_EARLY},
    writes_what_another_lane_reads: {WRITTEN_TOO_EARLY},
    writes_what_two_lanes_read: {WRITTEN_TOO_EARLY},
    writes_a_tile_of_another_shape: {WRITTEN_TOO_EARLY},
    writes_what_a_sum_needs: {WRITTEN_TOO_EARLY},
    writes_what_a_product_needs: {WRITTEN_TOO_EARLY},
    writes_what_a_transposed_tile_needs: {WRITTEN_TOO_EARLY},
    writes_what_a_reshaped_tile_needs: {WRITTEN_TOO_EARLY},
    writes_what_lanes_gather: {WRITTEN_TOO_EARLY},
    writes_twice: {WRITTEN_TWICE},
    reads_outside: {OUTSIDE},
    writes_outside: {OUTSIDE},
    reads_unwritten_memory: {UNWRITTEN},
    stores_undefined_lanes: {UNDEFINED},
    takes_the_next_number: {ORDER_MATTERS},
    each_lane_updates_its_own_element: set(),
}
# A record has 5 floats and 3 of padding. _parameters loads whole records, 16 bytes at once, and drops the padding.
PADDING = (UNWRITTEN, '_parameters')

if INTERPRETED:

    @pytest.mark.parametrize('mended', [False, True])
    @pytest.mark.parametrize('kernel', FAULTS, ids=lambda kernel: kernel.__name__)
    def test_finds_the_planted_fault_alone(kernel, mended):
        def launch(x):
            y = torch.empty_like(x)
            kernel[(2,)](x, y, mended)
            return y

        _, findings = sanitize(launch, torch.ones(512))
        assert found(findings) == (set() if mended else FAULTS[kernel])

    def test_takes_views_of_one_tensor():
        def launch(x):
            each_lane_updates_its_own_element[(3,)](x, x[16:32], True)

        (x,), findings = sanitize(launch, torch.ones(48))
        assert not findings
        assert torch.equal(x, torch.full((48,), 3.0))

    def test_runs_programs_in_every_order():
        orders = []
        for order in ORDERS:
            with Sanitizer(order):
                x, y = torch.zeros(1), torch.empty(40)
                takes_the_next_number[(4, 5, 2)](x, y, False)
            orders.append(tuple(y[:4].tolist()))
        assert len(set(orders)) == 3

    @pytest.mark.parametrize(('layer', 'dtype'), CASES, ids=str)
    def test_kernels_have_no_fault(layer, dtype):
        results, findings = run_layer(*layer, dtype)
        assert not {finding for finding in findings if (finding.kind, finding.kernel) != PADDING}
        assert all(result.isfinite().all() for result in results)

    def test_layers_run_every_kernel(monkeypatch):
        run = set()
        monkeypatch.setattr(Launcher, '__call__', lambda self, kernel, *rest: run.add(kernel))
        for layer in LAYERS:
            run_layer(*layer, orders=['forward'])  # launches nothing
        functions = [f for f in vars(dtn_triton).values() if isinstance(f, InterpretedFunction)]
        assert run == {f for f in functions if f.kwargs['do_not_specialize']}  # not the functions that kernels call

    def test_finds_that_a_kernel_lacks_its_barriers(monkeypatch):
        monkeypatch.setattr(tl, 'debug_barrier', lambda: None)
        _, findings = run_layer(*TALL, orders=['forward'])
        assert found(findings, '_columns_backward') == {READ_TOO_EARLY, WRITTEN_TOO_EARLY, WRITTEN_TWICE}

    def test_finds_that_a_kernel_writes_outside(monkeypatch):
        """Maps of cells have one float too few."""
        maps = dtn_triton._Call.maps
        monkeypatch.setattr(dtn_triton._Call, 'maps', lambda *a: dtn_triton.Pair(*(m.flatten()[:-1] for m in maps(*a))))
        _, findings = run_layer(*POOLED, orders=['forward'])
        assert found(findings, '_rows') == {OUTSIDE}

    @pytest.mark.parametrize(
        ('times', 'kernel', 'fault'),
        [(2, '_statistics', {BOTH_WRITE}), (0, '_grid', {UNWRITTEN, UNDEFINED})],
        ids=['twice', 'never'],
    )
    def test_finds_that_statistics_run_twice_or_never(times, kernel, fault, monkeypatch):
        call = Launcher.__call__

        def launch(self, kernel, grid, *rest):
            if kernel is dtn_triton._statistics:
                grid = (*grid[:2], times)
            call(self, kernel, grid, *rest)

        monkeypatch.setattr(Launcher, '__call__', launch)
        _, findings = run_layer(*SMALL, orders=['forward'])
        assert found(findings, kernel) == fault

else:

    @pytest.mark.slow
    def test_under_the_interpreter():
        run_interpreted(__file__)
