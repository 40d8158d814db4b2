"""Freed memory is reused for the next tensor."""

import platform
import subprocess
import sys

import pytest
from mmengine.config import Config

from mmdtn.engine import launch

PROGRAM = """
import resource, sys, torch
from mmdtn.engine.cpu import keep_freed_memory
if sys.argv[1] == 'keep':
    keep_freed_memory()
def pages():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(25_000_000)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(min(pages() for _ in range(9)))
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != 'glibc', reason='what it is told to is told to glibc')
def test_freed_memory_is_not_fetched_again():
    def fetched(how: str) -> int:
        done = subprocess.run([sys.executable, '-c', PROGRAM, how], capture_output=True, text=True, check=True)
        return int(done.stdout)

    assert fetched('keep') < 100
    assert fetched('as usual') > 100  # otherwise pages are so large on this machine that nothing can be gained


@pytest.mark.parametrize('accelerator', [False, True])
def test_training_and_testing_keep_it_on_cpus_alone(monkeypatch, accelerator):
    called = []
    monkeypatch.setattr(launch, 'has_accelerator', lambda: accelerator)
    monkeypatch.setattr(launch, 'keep_freed_memory', lambda: called.append(True))
    monkeypatch.setattr(launch.Runner, 'from_cfg', lambda cfg: cfg)
    launch.build_runner(Config(dict(launcher='none')))
    assert bool(called) != accelerator
