"""Trains once without a stop, and once with many kills: python killed_runs.py CONFIG DIRECTORY KILLS

Forked children start quickly, because this process has already imported everything.
"""

import os
import random
import signal
import sys
import time
import traceback
from pathlib import Path

import mmpretrain.models  # noqa: F401
import torch

from mmdtn.files import WholeFileBackend
from tools.train import main as train


def start(arguments, log, writes_before_death=None):
    child = os.fork()
    if child:
        return child
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    if writes_before_death is not None:
        die_in_a_write(writes_before_death)
    try:
        train(arguments)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def die_in_a_write(writes_before):
    """Kills this process when half of a checkpoint has been written."""
    left = iter([False] * writes_before)

    def write(self, content, path):
        if str(path).endswith('.pth') and next(left, True):

            def die(descriptor):
                os.ftruncate(descriptor, len(content) // 2)
                os.kill(os.getpid(), signal.SIGKILL)

            os.fsync = die
        put(self, content, path)

    put, WholeFileBackend.put = WholeFileBackend.put, write


def kill_after(child, log, iterations, delay):
    """Kills the process so many iterations after those in ``log``, or between two iterations."""
    before = count_iterations(log)
    while count_iterations(log) < before + iterations:
        if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            break
        time.sleep(0.01)
    time.sleep(delay)
    os.kill(child, signal.SIGKILL)


def count_iterations(log):
    return log.read_text().count('Epoch(train)') if log.exists() else 0


def wait(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main():
    config, folder, kills = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    assert wait(start([config, '--work-dir', str(folder / 'whole')], folder / 'whole.log')) == 0
    moments = random.Random(7)
    arguments = [config, '--work-dir', str(folder / 'killed'), '--resume']
    log = folder / 'killed.log'
    for number in range(kills):
        if number % 3 == 2:
            child = start(arguments, log, writes_before_death=moments.randrange(2))
        else:
            child = start(arguments, log)
            iterations = moments.randrange(6)
            kill_after(child, log, iterations, moments.uniform(0, 0.05 if iterations else 1.5))
        assert wait(child) == -signal.SIGKILL
        print('killed; left:', *sorted(p.name for p in (folder / 'killed').glob('*.p*')), flush=True)
    assert wait(start(arguments, log)) == 0


if __name__ == '__main__':
    main()
