"""Freed memory is there for the next tensor."""

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys, torch
from mmdtn.engine.memory import keep_freed_memory
if sys.argv[1] == 'keep':
    keep_freed_memory()
def pages():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(25_000_000)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(min(pages() for _ in range(9)))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != 'glibc', reason='what it is told to is told to glibc')
def test_freed_memory_is_not_fetched_again():
    def fetched(how: str) -> int:
        done = subprocess.run([sys.executable, '-c', PROGRAM, how], capture_output=True, text=True, check=True)
        return int(done.stdout)

    assert fetched('keep') < 100
    assert fetched('as usual') > 100  # or the machine fetches so large pages that nothing is to be gained
