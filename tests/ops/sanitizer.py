"""Finds faults of Triton kernels that a GPU shows by chance alone.

A GPU runs the programs of a launch in any order, and the threads of a program in any order between two barriers.
Triton's interpreter runs programs one after another, and the operations of a program one after another for all lanes of
a tile. So a race gives the right result there. :class:`Sanitizer` instruments the interpreter: it changes the order of
programs, notes who reads and writes each address, and poisons memory that nothing has written.

The interpreter has no hook for any of this. Every load, store and barrier passes through the methods of its builder.
The process has one builder. Its methods are replaced while a sanitizer is entered.

Findings are limited to what the kernels do for the given inputs. Atomics, and elements of different sizes that overlap
in memory, are not examined. An address outside of one tensor but inside another one of the same launch is not found.
"""

import sys
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple
from unittest.mock import patch

import numpy as np
import torch
import triton.language as tl
from torch.utils._pytree import tree_leaves, tree_map
from triton.runtime import interpreter

from .interpreted import POISON, Guards

ORDERS = ('forward', 'reversed', 'shuffled')

# Kinds of findings
BOTH_WRITE = 'two programs write one address'
READS_OTHERS = 'a program reads what another program of the launch wrote'
REPLACES_OTHERS = 'a program writes what another program of the launch read'
LANES_DISAGREE = 'lanes of one store write different values to one address'
READ_TOO_EARLY = 'no barrier between a write and a read'
WRITTEN_TOO_EARLY = 'no barrier between a read and a write'
WRITTEN_TWICE = 'no barrier between two writes'
OUTSIDE = 'address outside of all tensors of the launch'
UNWRITTEN = 'memory is read that nothing has written'
UNDEFINED = 'an undefined value, or another nan, is stored'
ORDER_MATTERS = 'results depend on the order of programs'

# Operations of the builder that move values from one lane to another
EXCHANGES = ('create_dot', 'create_gather', 'create_reshape', 'create_trans')


class Finding(NamedTuple):
    kind: str
    kernel: str = ''
    lines: str = ''  # from the kernel down to the function that accesses memory


def sanitize(function, *tensors, orders=ORDERS):
    """Calls ``function`` with copies of the tensors, once for each order of programs.

    Returns the tensors that the call returns or changes, and the set of all findings.
    """
    runs, findings = [], set()
    for order in orders:
        with Sanitizer(order) as sanitizer:
            copies = tree_map(lambda t: torch.empty_like(t).copy_(t), tensors)
            results = [t for t in tree_leaves((function(*copies), copies)) if isinstance(t, torch.Tensor)]
        runs.append(results)
        findings |= sanitizer.findings
    if not all(_same_bits(a, b) for run in runs for a, b in zip(runs[0], run, strict=True)):
        findings.add(Finding(ORDER_MATTERS))
    return runs[0], findings


def _same_bits(a, b):
    return torch.equal(*(t.contiguous().flatten().view(torch.uint8) for t in (a, b)))


class Accesses:
    """Who accessed each address of some tensors during one launch. Programs and steps are numbered from 1."""

    def __init__(self, tensors):
        spans = []
        for start, end in sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in tensors if t.numel()):
            if spans and start < spans[-1][1]:  # a view of the tensor before
                spans[-1][1] = max(end, spans[-1][1])
            else:
                spans.append([start, end])
        self.starts, self.ends = np.array(spans, np.int64).reshape(-1, 2).T
        sizes = self.ends - self.starts
        self.offsets = self.starts - (np.cumsum(sizes) - sizes)  # from an address to an index of the arrays below
        # A step is the part of a program between two barriers. `last` is used within one store alone.
        self.writer, self.write_step, self.first_reader, self.read_step, self.owner, self.last = (
            np.zeros(sizes.sum(), np.int64) for _ in range(6)
        )

    def find(self, addresses, size):
        """Indices of the addresses that lie in a tensor, and which ones do."""
        span = np.searchsorted(self.starts, addresses, 'right') - 1
        inside = (span >= 0) & (addresses + size <= self.ends[span])
        return (addresses - self.offsets[span])[inside], inside


class Sanitizer(Guards):
    """Instruments the interpreter while it is entered, and collects ``findings``."""

    def __init__(self, order='forward'):
        super().__init__()
        self.order, self.random = order, np.random.default_rng(0)
        self.findings = set()
        self.step = self.exchanges = 0
        self.numbers = {}  # of pairs of `exchanges` and the shape of a tile

    def __enter__(self):
        builder, self._replaced = interpreter.interpreter_builder, ExitStack()

        def replace(thing, name, method):
            method = partial(method, getattr(thing, name))
            # A class binds the functions in it to its objects, but not what `partial` returns.
            new = (lambda *args, **kwargs: method(*args, **kwargs)) if isinstance(thing, type) else method
            self._replaced.enter_context(patch.object(thing, name, new))

        replace(builder, 'set_grid_dim', self._begin_launch)
        replace(builder, 'set_grid_idx', self._begin_program)
        replace(builder, 'create_barrier', self._barrier)
        replace(builder, 'create_masked_load', self._load)
        replace(builder, 'create_masked_store', self._store)
        for name in EXCHANGES:
            replace(builder, name, self._exchange)
        # The builder sees neither reductions nor the tensors that a launch is given.
        replace(interpreter.ReduceScanOpInterface, 'apply', self._exchange)
        replace(interpreter.GridExecutor, '__call__', self._launch)
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self._replaced.close()

    def _launch(self, call, executor, *arguments, **options):
        self.kernel = executor.fn.__code__
        self.arguments = [t for t in tree_leaves((arguments, options)) if isinstance(t, torch.Tensor)]
        return call(executor, *arguments, **options)

    def _begin_launch(self, set_grid_dim, *grid):
        set_grid_dim(*grid)
        self.accesses = Accesses(self.arguments)
        programs = np.arange(np.prod(grid))
        shuffled = self.random.permutation(programs)
        self.programs = iter(dict(forward=programs, reversed=programs[::-1], shuffled=shuffled)[self.order])
        self.grid = grid

    def _begin_program(self, set_grid_idx, *_):
        program = next(self.programs)
        set_grid_idx(*map(int, np.unravel_index(program, self.grid)))
        self.program = program + 1
        self.step += 1

    def _barrier(self, create_barrier):
        self.step += 1
        return create_barrier()

    def _exchange(self, operation, *arguments):
        self.exchanges += 1
        return operation(*arguments)

    def _note(self, kind, found):
        if np.any(found):
            lines, frame = [], sys._getframe(1)
            while frame and frame.f_code is not self.kernel:
                frame = frame.f_back
                if frame and frame.f_code.co_filename == self.kernel.co_filename:
                    lines.insert(0, f'{frame.f_code.co_name}:{frame.f_lineno}')
            self.findings.add(Finding(kind, self.kernel.co_name, ' > '.join(lines)))

    def _accessed(self, pointers, mask):
        """Where active lanes access memory, the numbers of these lanes, and the mask without lanes outside."""
        active = np.array(mask.data, bool)
        addresses = np.broadcast_to(pointers.data, active.shape)[active].astype(np.int64)
        at, inside = self.accesses.find(addresses, pointers.get_element_ty().primitive_bitwidth // 8)
        self._note(OUTSIDE, ~inside)
        active[active] = inside
        return at, np.flatnonzero(active), interpreter.TensorHandle(active, tl.int1)

    def _owner(self, lanes, shape):
        """A number for each lane of a tile, which is another one after values have moved between lanes."""
        return lanes + (self.numbers.setdefault((self.exchanges, shape), len(self.numbers) + 1) << 21)

    def _load(self, load, pointers, mask, other, *options):
        at, lanes, mask = self._accessed(pointers, mask)
        a, me, owner = self.accesses, self.program, self._owner(lanes, mask.data.shape)
        self._note(READS_OTHERS, (a.writer[at] != 0) & (a.writer[at] != me))
        self._note(READ_TOO_EARLY, a.write_step[at] == self.step)
        a.first_reader[at] = np.where(a.first_reader[at] == 0, me, a.first_reader[at])
        # The one lane that has read an address in this step, or -1
        a.owner[at] = np.where((a.read_step[at] == self.step) & (a.owner[at] != owner), -1, owner)
        a.owner[at[a.owner[at] != owner]] = -1
        a.read_step[at] = self.step
        element = pointers.get_element_ty()
        # The interpreter loses an `other` of 0 if there is one lane alone.
        if other is None and element.is_floating() and mask.data.size > 1:
            dtype = interpreter._get_np_dtype(element)
            poison = np.full(mask.data.size * dtype.itemsize, POISON, np.uint8).view(dtype).reshape(mask.data.shape)
            other = interpreter.TensorHandle(poison, element)
        result = load(pointers, mask, other, *options)
        if element.is_floating():
            values = result.data.ravel()[lanes]
            self._note(UNWRITTEN, (values.view(np.uint8).reshape(-1, values.itemsize) == POISON).all(1))
        return result

    def _store(self, store, pointers, value, mask, *options):
        at, lanes, mask = self._accessed(pointers, mask)
        a, me, owner = self.accesses, self.program, self._owner(lanes, mask.data.shape)
        values = np.broadcast_to(value.data, mask.data.shape).ravel()[lanes]
        a.last[at] = number = np.arange(len(at))
        self._note(LANES_DISAGREE, (a.last[at] != number) & (values != values[a.last[at]]))
        self._note(UNDEFINED, values.dtype.kind == 'f' and np.isnan(values))
        self._note(BOTH_WRITE, (a.writer[at] != 0) & (a.writer[at] != me))
        self._note(REPLACES_OTHERS, (a.first_reader[at] != 0) & (a.first_reader[at] != me))
        # A lane may replace a value which it alone has read and which no other lane has received.
        self._note(WRITTEN_TOO_EARLY, (a.read_step[at] == self.step) & (a.owner[at] != owner))
        self._note(WRITTEN_TWICE, a.write_step[at] == self.step)
        a.writer[at], a.write_step[at] = me, self.step
        return store(pointers, value, mask, *options)
