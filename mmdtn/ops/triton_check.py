"""Checks the Triton kernels on a GPU. The operator uses them only if they pass.

The check runs small layers forward and backward and compares the results with ``reference``. The check has to compile
the kernels, so it takes about a minute. A file stores the outcome for each combination of GPU, driver, torch, Triton
and source code, so a machine runs the check only once. Moving a ``DTN`` layer to a GPU starts the check, which
therefore runs before the first training step.
"""

import contextlib
import hashlib
import json
import os
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from filelock import FileLock
from mmengine.dist import all_reduce, is_distributed
from mmengine.logging import print_log
from torch import Tensor

from . import dtn_triton, reference
from .interface import Settings, Tensors

# Largest relative errors of the output and the gradients: the norm of the difference over the norm of the reference.
TOLERANCES = {torch.float32: (1e-5, 1e-4), torch.float16: (2e-3, 4e-3), torch.bfloat16: (1e-2, 2e-2)}
SOURCES = ('dtn_triton.py', 'triton_launch.py', 'triton_check.py', 'reference.py')


class Case(NamedTuple):
    """A layer to check."""

    grid: tuple[int, int]
    channels: int
    heads: int
    pool_size: int
    dtype: torch.dtype

    def __str__(self) -> str:
        height, width = self.grid
        return f'{str(self.dtype)[6:]}, {height} x {width} tokens, {self.channels} channels, pool_size={self.pool_size}'


# The short check runs on every machine and covers every branch of every kernel. The dtype affects only loads and
# stores.
SHORT = [Case(*case, dtype=torch.float32) for case in dtn_triton.CHECKS] + [Case((5, 7), 24, 2, 2, torch.float16)]
LONG = [Case(*case, dtype=dtype) for dtype in TOLERANCES for case in dtn_triton.CHECKS]

_found: dict[torch.device, str | None] = {}  # outcome in this process: None or an error message
_agreed: dict[torch.device, str | None] = {}  # outcome in all processes of a training run


def prepare(device: torch.device) -> None:
    """Checks the kernels on ``device``, unless a check has run already or cannot run now."""
    exists = (
        device.type == dtn_triton.DEVICE and dtn_triton.triton and (dtn_triton.INTERPRETED or torch.cuda.is_available())
    )
    if exists and device not in _found and not _must_wait():
        _found[device] = _outcome(device)
        if _found[device]:
            _warn(f'on {device}: {_found[device]}')


def works(device: torch.device) -> bool:
    """Returns whether the kernels may be used on ``device``.

    In a distributed run, the kernels are used only if they pass the check in every process.
    """
    if dtn_triton.triton is None:
        return False
    if device in _agreed:
        return _agreed[device] is None
    if device not in _found:
        prepare(device)
        if device not in _found:  # a later call runs the check
            return True
    if torch.is_grad_enabled() and is_distributed():
        failed = torch.tensor(int(_found[device] is not None), device=device)
        all_reduce(failed, 'max')
        _agreed[device] = 'on another device of this run' if failed and not _found[device] else _found[device]
        if failed and not _found[device]:
            _warn('on another device of this run')
    return _agreed.get(device, _found[device]) is None


def _must_wait() -> bool:
    """Returns whether the check has to wait, because nothing can be computed and differentiated now."""
    if torch.compiler.is_compiling() or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
        return True
    with _usual_modes(torch.device('cpu')):  # autograd still records nothing inside a custom operator
        return not torch.ones(1, device='cpu', requires_grad=True).clone().requires_grad


def _warn(what: str) -> None:
    warnings.warn(
        f"DTN's Triton kernels failed their check {what}. The plain torch form computes DTN from now on: the results "
        'are right, but it is slower. `python -m mmdtn.doctor` checks again and says more.',
        stacklevel=3,
    )


def _outcome(device: torch.device) -> str | None:
    """Returns the stored outcome or runs the check. Only one process runs the check, and the others wait."""
    record = record_of(device)
    if (known := _read(record)) is not None:
        return known['wrong']
    with _locked(record):
        if (known := _read(record)) is not None:
            return known['wrong']
        return check(device, SHORT)


def check(device: torch.device, cases: list[Case]) -> str | None:
    """Runs the cases and stores the outcome, which is None or an error message."""
    started = time.perf_counter()
    name = torch.cuda.get_device_name(device) if device.type == 'cuda' else str(device)
    print_log(f"Checking DTN's Triton kernels on {name}: about a minute, once for this machine.", 'current')
    wrong = self_check(device, cases)
    seconds = time.perf_counter() - started
    record = record_of(device)
    print_log(
        f'The check took {seconds:.0f} s: {wrong or "all is well"}. The outcome is stored in {record}.', 'current'
    )
    with contextlib.suppress(OSError):  # without a stored outcome, the next process checks again
        record.parent.mkdir(parents=True, exist_ok=True)
        unfinished = record.with_suffix(f'.{os.getpid()}')
        unfinished.write_text(json.dumps(dict(_versions(device), seconds=round(seconds, 1), wrong=wrong), indent=1))
        os.replace(unfinished, record)
    return wrong


def record_of(device: torch.device) -> Path:
    """Returns the path of the file with the outcome."""
    folder = Path(os.environ.get('XDG_CACHE_HOME') or Path.home() / '.cache') / 'mmdtn'
    return folder / f'triton_{hashlib.sha256(json.dumps(_versions(device)).encode()).hexdigest()[:16]}.json'


def _versions(device: torch.device) -> dict[str, str]:
    """Returns everything that the outcome depends on."""
    source = b''.join(Path(__file__).with_name(name).read_bytes() for name in SOURCES)
    versions = dict(torch=torch.__version__, triton=dtn_triton.triton.__version__, device=str(device.type))
    if device.type == 'cuda':
        capability = '.'.join(map(str, torch.cuda.get_device_capability(device)))
        versions |= dict(device=torch.cuda.get_device_name(device), capability=capability, driver=_driver())
    return versions | dict(interpreted=str(dtn_triton.INTERPRETED), source=hashlib.sha256(source).hexdigest()[:16])


def _driver() -> str:
    """Reads the version of the GPU driver from a Linux file, because torch has no function for it."""
    try:
        return Path('/proc/driver/nvidia/version').read_text().partition('\n')[0]
    except OSError:
        return str(torch.version.hip)


def _read(record: Path) -> dict | None:
    try:
        return json.loads(record.read_text())
    except (OSError, ValueError):
        return None


@contextlib.contextmanager
def _locked(record: Path) -> Iterator[None]:
    try:
        record.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(record.with_suffix('.lock'))
        lock.acquire()
    except OSError:  # the home folder is read-only, so each process runs its own check
        yield
        return
    try:
        yield
    finally:
        lock.release()


def self_check(device: torch.device, cases: list[Case] = SHORT) -> str | None:
    """Runs small layers forward and backward. Returns None if all results are correct, or else an error message."""
    with _usual_modes(device):
        return next(filter(None, (_wrong(device, case) for case in cases)), None)


@contextlib.contextmanager
def _usual_modes(device: torch.device) -> Iterator[None]:
    """Turns off inference mode, no_grad, autocast and the hooks of activation checkpointing."""
    keep = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
    with torch.inference_mode(False), torch.enable_grad(), keep, torch.autocast(device.type, enabled=False):
        yield


def _wrong(device: torch.device, case: Case) -> str | None:
    (height, width), C, K, pool_size, dtype = case
    s, generator = Settings(pool_size), torch.Generator().manual_seed(0)

    def random(kind: Callable[..., Tensor], *shape: int) -> Tensor:
        return kind(*shape, generator=generator, dtype=torch.float32, device='cpu').to(device)

    x, grad = (random(torch.randn, 2, height, width, C).to(dtype) for _ in range(2))
    weight, bias, mean_lambda, var_lambda = (random(torch.rand, n) for n in (C, C, K, K))
    t = Tensors(x, weight, bias, mean_lambda, var_lambda, random(torch.randn, K, 3) / 4)
    try:
        y, kept = dtn_triton.forward(t, s, dtype)
        gradients = dtn_triton.backward(grad, t, kept, s)
        y, kept = dtn_triton.forward(t, s, dtype)  # later calls launch the kernels differently
        again = dtn_triton.backward(grad, t, kept, s)
    except torch.cuda.OutOfMemoryError:
        raise
    except Exception as error:  # compilers may raise errors of any class
        return f'{case}: {type(error).__name__}: {error}'
    if not all(map(torch.equal, gradients, again)):
        return f'{case}: the same call gives other gradients the second time'
    exact = Tensors(*(tensor.double().requires_grad_() for tensor in t))
    expected = reference.dtn(exact, s)
    expected_gradients = torch.autograd.grad(expected, exact, grad.double())
    names = ('output', *(f'gradient of {name}' for name in t._fields))
    pairs = zip((y, *gradients), (expected, *expected_gradients), strict=True)
    for name, (ours, right) in zip(names, pairs, strict=True):
        difference = ((ours.double() - right).norm() / right.norm()).item()
        limit = TOLERANCES[dtype][name != 'output']
        if not difference <= limit:
            return f'{case}: {name} differs from the reference by {difference:.1e}, more than {limit:.0e}'
    return None
