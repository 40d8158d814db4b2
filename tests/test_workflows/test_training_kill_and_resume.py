"""A run that is killed at any moment ends with the same weights as an uninterrupted one."""

import re
import sys
from pathlib import Path

import pytest
import torch

from mmdtn.datasets import write_classification
from tests.training import run_command, write_classifier

# The run saves checkpoints within epochs of five batches, and has validations and an averaged model.
MORE = """
train_cfg = dict(max_epochs=20, val_interval=4)
default_hooks = dict(logger=dict(interval=1), checkpoint=dict(interval=3, by_epoch=False, max_keep_ckpts=2))
custom_hooks = [dict(type='EMAHook', momentum=0.1)]
"""


def tensors(value, name=''):
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from tensors(part, f'{name}.{key}')
    elif isinstance(value, list):
        for i, part in enumerate(value):
            yield from tensors(part, f'{name}.{i}')


@pytest.mark.slow
def test_ten_kills_do_not_change_the_weights(tmp_path):
    data = write_classification(tmp_path / 'data', train=20, val=10)
    config = write_classifier(tmp_path / 'config.py', data, MORE)
    done = run_command(sys.executable, Path(__file__).parent / 'killed_runs.py', config, tmp_path, 10, cwd=tmp_path)
    assert done.stdout.count('killed; left:') == 10, done.stdout
    assert '.partial' in done.stdout, 'some of them died while they wrote a checkpoint'
    resumed_at = [int(n) for n in re.findall(r'resumed epoch: \d+, iter: (\d+)', (tmp_path / 'killed.log').read_text())]
    assert any(n % 5 for n in resumed_at), 'some of them went on within an epoch'

    whole, killed = (torch.load(tmp_path / run / 'iter_100.pth', weights_only=False) for run in ('whole', 'killed'))
    for part in ('state_dict', 'ema_state_dict', 'optimizer'):
        expected, found = dict(tensors(whole[part])), dict(tensors(killed[part]))
        assert expected.keys() == found.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6, msg=f'{part}{name}')
    assert whole['param_schedulers'] == killed['param_schedulers']
