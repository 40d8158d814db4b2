import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from mmengine.hooks import Hook

from mmdtn.engine.hooks.whole_checkpoint import WholeCheckpointHook, newest_whole_checkpoint
from mmdtn.files import PARTIAL, WholeFileBackend
from tests.engine.toy import train


class Scores(Hook):
    """Metric whose result improves with each validation."""

    priority = 'LOWEST'

    def __init__(self):
        self.there = []

    def after_train_epoch(self, runner):
        checkpoints = next(hook for hook in runner.hooks if isinstance(hook, WholeCheckpointHook))
        checkpoints.after_val_epoch(runner, metrics=dict(acc=runner.epoch + 1.0))
        self.there.append(os.path.exists(os.path.join(runner.work_dir, 'best_acc_now.pth')))


@pytest.fixture
def saved(tmp_path):
    """Returns a work directory with the checkpoints of iterations 2 to 14."""
    train(tmp_path)
    return tmp_path


def test_the_newest_whole_checkpoint_is_taken(saved):
    newest = saved / 'iter_14.pth'
    assert newest_whole_checkpoint(saved).name == 'iter_15.pth'  # of the last iteration
    (saved / 'iter_15.pth').unlink()
    assert newest_whole_checkpoint(saved) == newest
    content = newest.read_bytes()
    for half in (b'', content[: len(content) // 2], content[:-1], b'\0' * len(content)):
        newest.write_bytes(half)
        assert newest_whole_checkpoint(saved).name == 'iter_12.pth', len(half)
    newest.write_bytes(content[:1000] + bytes([content[1000] ^ 1]) + content[1001:])  # one bit
    assert newest_whole_checkpoint(saved).name == 'iter_12.pth'


def test_a_copied_folder_has_no_times_to_go_by(saved):
    os.utime(saved / 'iter_8.pth')
    assert newest_whole_checkpoint(saved).name == 'iter_15.pth'


def test_what_training_cannot_go_on_from_is_not_taken(saved):
    weights = torch.load(saved / 'iter_14.pth', weights_only=False)
    del weights['optimizer']
    torch.save(weights, saved / 'best_acc_iter_15.pth')
    torch.save([1, 2], saved / 'list.pth')
    assert newest_whole_checkpoint(saved).name == 'iter_15.pth'
    assert newest_whole_checkpoint(saved / 'nowhere') is None


def test_a_failed_write_leaves_the_file_that_was_there(tmp_path, monkeypatch):
    path = tmp_path / 'a.pth'
    backend = WholeFileBackend()
    backend.put(b'first', path)

    def disk_is_full(descriptor):
        raise OSError(28, 'No space left on device')

    monkeypatch.setattr(os, 'fsync', disk_is_full)
    with pytest.raises(OSError, match='disk is full'):
        backend.put(b'second', path)
    assert path.read_bytes() == b'first' and os.listdir(tmp_path) == ['a.pth']


def test_results_are_whole_whoever_writes_them(tmp_path):
    """In mmengine, each process writes the results, with its own times."""
    script = """
import sys, mmengine
from mmdtn.files import write_whole_files
write_whole_files()
for i in range(300):
    mmengine.dump(dict(time='1' * int(sys.argv[1])), 'results.json')
"""
    command = [sys.executable, '-c', script]
    both = [subprocess.Popen([*command, length], cwd=tmp_path) for length in ('10', '9000')]
    while any(process.poll() is None for process in both):
        if (tmp_path / 'results.json').exists():
            json.loads((tmp_path / 'results.json').read_text())
    assert [process.returncode for process in both] == [0, 0] and os.listdir(tmp_path) == ['results.json']


@pytest.mark.parametrize('keep', [1, 2])
def test_old_checkpoints_go_after_the_new_one_is_there(tmp_path, monkeypatch, keep):
    there = []
    put = WholeFileBackend.put

    def look(self, content, path):
        put(self, content, path)
        if str(path).endswith('.pth'):
            there.append(len(list(tmp_path.glob('*.pth'))))

    monkeypatch.setattr(WholeFileBackend, 'put', look)
    train(tmp_path, max_keep_ckpts=keep)
    assert max(there) == there[-1] == keep + 1
    assert len(list(tmp_path.glob('*.pth'))) == keep


def test_a_checkpoint_that_replaces_one_of_its_name_stays(tmp_path):
    train(tmp_path, max_keep_ckpts=1, filename_tmpl='latest.pth')
    assert torch.load(tmp_path / 'latest.pth', weights_only=False)['meta']['iter'] == 15


def test_the_best_checkpoint_stays_where_all_have_one_name(tmp_path):
    hook = Scores()
    train(tmp_path, hooks=[hook], save_best='acc', by_epoch=True, filename_tmpl='now.pth')
    assert hook.there == [True, True, True]


def test_leftovers_of_a_killed_run_are_removed(saved):
    shutil.copy(saved / 'iter_2.pth', saved / f'iter_16.pth.77{PARTIAL}')
    train(saved)
    assert not list(saved.glob(f'*{PARTIAL}'))
