"""The Triton kernels against the definition, under Triton's interpreter.

It knows nothing of registers, precision and time (test_dtn_triton_compiled.py reads the compiled kernels), but all of
the arithmetic. It has to be chosen before the kernels are defined, so these tests run in a process of their own.
"""

import os
import subprocess
import sys
import textwrap

import pytest
import torch

from mmdtn.ops import Settings, Tensors, dtn_triton, reference, triton_check

from .interpreted import INTERPRETED, Guards, run_interpreted, tensors

pytest.importorskip('triton')

# B, H, W, C, heads, settings
CASES = [
    (2, 1, 1, 7, 1, Settings()),
    (2, 5, 7, 24, 3, Settings()),
    (1, 16, 16, 20, 2, Settings(unbiased=True)),
    (2, 3, 14, 96, 2, Settings(prenorm=False)),
    (1, 6, 6, 84, 12, Settings(eps=1e-3)),
    (1, 4, 6, 10, 5, Settings(identity=True)),
    (2, 17, 3, 21, 3, Settings()),
    (1, 2, 35, 66, 1, Settings(unbiased=True)),
    (1, 18, 4, 8, 4, Settings(prenorm=False)),
    (1, 4, 18, 8, 1, Settings(identity=True)),
    (2, 5, 7, 18, 2, Settings(2)),
    (1, 9, 8, 27, 9, Settings(3, unbiased=True)),
    (1, 9, 37, 6, 2, Settings(4, prenorm=False)),
    (1, 35, 3, 5, 1, Settings(2, pool_second_moment=False)),
    (2, 3, 3, 4, 2, Settings(4, pool_second_moment=False)),
    (1, 40, 2, 6, 1, Settings(2, identity=True)),
]
TOLERANCES = {torch.float32: (1e-5, 1e-4), torch.float16: (1e-3, 1e-3), torch.bfloat16: (8e-3, 8e-3)}


def expected(grad, inputs, s):
    y, pull_back = torch.func.vjp(lambda t: reference.dtn(t, s), Tensors(*(t.double() for t in inputs)))
    return y, *pull_back(grad.double())[0]


def compare(grad, inputs, s, dtype):
    with Guards() as guards:
        y, kept = dtn_triton.forward(inputs, s, dtype)
        gradients = dtn_triton.backward(grad, inputs, kept, s)
    assert guards.untouched()
    assert y.dtype == dtype
    for i, (ours, right, like) in enumerate(zip((y, *gradients), expected(grad, inputs, s), (y, *inputs), strict=True)):
        assert (ours.shape, ours.dtype, ours.is_contiguous()) == (like.shape, like.dtype, True)
        limit = TOLERANCES[inputs[0].dtype][i > 0]
        assert (ours.double() - right).norm() <= limit * right.norm() + 1e-7, i


if INTERPRETED:

    @pytest.mark.parametrize(('B', 'H', 'W', 'C', 'K', 's'), CASES, ids=str)
    def test_computes_what_the_reference_defines(B, H, W, C, K, s):
        compare(*tensors(B, H, W, C, K, torch.float32), s, torch.float32)

    @pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
    @pytest.mark.parametrize('case', [CASES[1], CASES[6], CASES[10]], ids=str)
    def test_takes_half_precision(case, dtype):
        *shape, s = case
        compare(*tensors(*shape, dtype), s, dtype)

    def test_gives_the_dtype_that_is_asked_for():
        _, inputs = tensors(1, 3, 3, 4, 2, torch.float16)
        assert dtn_triton.forward(inputs, Settings(), torch.float32)[0].dtype == torch.float32

    @pytest.mark.parametrize('size', [(5, 6), (4, 19)], ids=str)
    def test_heads_that_look_into_far_corners(size):
        """Where P is nearly one-hot its slopes are nearly 0: exact only relative to the cell that a row looks at."""
        grad, inputs = tensors(1, *size, 6, 2, torch.float32)
        inputs = inputs._replace(position=torch.tensor([[0.3, 1.0, -1.0], [-2.0, 3.0, 1.0]]))
        compare(grad, inputs, Settings(), torch.float32)

    @pytest.mark.parametrize(('size', 'pool'), [((4, 5), 1), ((3, 18), 1), ((6, 5), 2)], ids=str)
    def test_an_offset_costs_what_it_costs_layernorm(size, pool):
        s = Settings(pool)
        grad, inputs = tensors(1, *size, 32, 2, torch.float32, offset=1e3)
        y, kept = dtn_triton.forward(inputs, s, torch.float32)
        gradients = dtn_triton.backward(grad, inputs, kept, s)
        right = expected(grad, inputs, s)
        x, weight, bias = inputs[:3]

        def layernorm(*t):
            return torch.nn.functional.layer_norm(t[0], (32,), *t[1:])

        plain, pull_back = torch.func.vjp(layernorm, x, weight, bias)
        exact, exactly = torch.func.vjp(layernorm, *(t.double() for t in (x, weight, bias)))
        for ours, theirs in (
            ((y, right[0]), (plain, exact)),
            ((gradients[0], right[1]), (pull_back(grad)[0], exactly(grad.double())[0])),
        ):
            error, allowed = (((a - b).norm() / b.norm()).item() for a, b in (ours, theirs))
            assert error <= 3 * allowed
        assert all(g.isfinite().all() for g in gradients)

    # Goals of the operator's design for whole steps. Bytes over the input hardly depend on how many rows an image has.
    @pytest.mark.parametrize(
        ('shape', 'dtype', 'goal'),
        [
            ((1, 24, 24, 64, 4, 4), torch.float32, 13),
            ((1, 24, 24, 64, 4, 4), torch.float16, 16),
            ((1, 17, 32, 64, 1, 1), torch.float32, 32),
            ((1, 17, 32, 64, 1, 1), torch.float16, 55),
            ((2, 14, 14, 432, 9, 1), torch.float32, 11),
            ((8, 14, 14, 432, 9, 1), torch.float16, 12),
        ],
        ids=str,
    )
    def test_moves_no_more_than_its_goal(shape, dtype, goal):
        from mmdtn.benchmarks.traffic import count_dtn

        forward, backward, kept = count_dtn(*shape, dtype)
        assert forward.launches <= 8
        assert backward.launches <= 14
        assert forward.moved + backward.moved <= goal
        assert max(forward.temporary, backward.temporary) <= (4 if dtype == torch.float32 else 8)
        assert kept <= 2

    def test_check_of_a_device():
        assert triton_check.self_check(torch.device('cpu')) is None

else:

    @pytest.mark.slow
    def test_under_the_interpreter():
        run_interpreted(__file__)

    @pytest.mark.slow
    def test_processes_follow_the_worst_answer(tmp_path):
        """The record on the second process' machine says that the check failed there."""
        code = f"""
            import json, sys, torch
            from mmdtn.ops import triton_check
            rank, device = int(sys.argv[1]), torch.device('cpu')
            record = triton_check.record_of(device)
            record.parent.mkdir(parents=True)
            record.write_text(json.dumps(dict(wrong='planted' if rank else None)))
            torch.distributed.init_process_group('gloo', 'file://{tmp_path}/meet', rank=rank, world_size=2)
            with torch.no_grad():
                print(triton_check.works(device))  # for itself
            print(triton_check.works(device), triton_check.works(device))
            """
        processes = [
            subprocess.Popen(
                [sys.executable, '-W', 'always::UserWarning', '-c', textwrap.dedent(code), str(rank)],
                env=dict(os.environ, TRITON_INTERPRET='1', XDG_CACHE_HOME=f'{tmp_path}/{rank}'),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        said = [process.communicate(timeout=300) for process in processes]
        for (out, err), alone, where in zip(said, (True, False), ('another device of this run', 'cpu: '), strict=True):
            assert out.split() == [str(alone), 'False', 'False'], err
            assert err.count('failed their check') == 1 and f'failed their check on {where}' in err
