"""Runs studies with fast stand-ins for the tools. The test tool reports its niceness as the accuracy."""

import json
import os
import sys
import threading
from pathlib import Path

import pytest
import torch

from mmdtn.studies import Record
from tools.study import main

TRAIN = """
import json, shutil, sys
from pathlib import Path
work = Path(sys.argv[sys.argv.index('--work-dir') + 1])
options = dict(word.split('=', 1) for word in sys.argv[sys.argv.index('--cfg-options') + 1 :])
logs = work / '20260101_000000' / 'vis_data'
logs.mkdir(parents=True, exist_ok=True)
shutil.copy('checkpoint.pth', work / 'iter_1.pth')
if Path('stop').exists():
    sys.exit('stopped after the first checkpoint')
if options.get('norm') == 'none':
    sys.exit('there is no norm none')
shutil.copy('checkpoint.pth', work / 'iter_2.pth')
lines = [dict(loss=1.0, iter=1, step=1), {'accuracy/top1': 50.0 + float(options['randomness.seed']), 'step': 2}]
(logs / 'scalars.json').write_text('\\n'.join(map(json.dumps, lines)))
"""
TEST = """
import json, os, sys
from pathlib import Path
folder = Path(sys.argv[sys.argv.index('--work-dir') + 1]) / '20260101_000000'
folder.mkdir(parents=True, exist_ok=True)
found = {'accuracy/top1': os.getpriority(os.PRIO_PROCESS, 0), 'coco/bbox_mAP': float('iter_2' in sys.argv[2])}
(folder / '20260101_000000.json').write_text(json.dumps(found))
"""
STUDY = """
title = 'A test'
config = 'config.py'
metrics = {'top-1': 'accuracy/top1'}
variants = {'LN': {'norm': 'LN'}, 'DTN': {'norm': 'DTN'}}
seeds = (0,)
evaluations = {'niceness': dict(metrics={'niceness': 'accuracy/top1'})}
"""


@pytest.fixture
def study(tmp_path, monkeypatch):
    """Returns a function that writes the study with additional lines and runs it."""
    for name, text in {'train': TRAIN, 'test': TEST}.items():
        (tmp_path / 'root' / 'tools').mkdir(parents=True, exist_ok=True)
        (tmp_path / 'root' / 'tools' / f'{name}.py').write_text(text)
    (tmp_path / 'config.py').write_text("norm = 'LN'\nlr = 1\n")
    torch.save(dict(meta={}, state_dict={}, optimizer={}), tmp_path / 'checkpoint.pth')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr('tools.study.ROOT', tmp_path / 'root')

    def call(more='', *arguments):
        Path('small.py').write_text(STUDY + more)
        main(['small.py', '--processes', '1', '--results', 'results', '--work-dir', 'work', *arguments])

    return call


def kept(variant):
    return Record.load(Path('results', 'small', f'{variant}-0.json'))


MORE = "evaluations['model'] = dict(metrics={'AP': 'coco/bbox_mAP'})\n"


def test_what_is_missing_of_a_committed_record_is_measured_on_a_model_trained_anew(study, capsys):
    """Records are committed, but checkpoints are not."""
    study()
    for file in Path('work').rglob('*.pth'):
        file.unlink()
    for file in Path('work/small/LN-0').iterdir():
        file.unlink() if file.is_file() else None
    capsys.readouterr()
    study(MORE, '--variants', 'LN')
    assert 'training: small, LN, seed 0' in capsys.readouterr().out
    assert kept('LN').evaluations.keys() == {'niceness', 'model'}


def test_an_evaluation_that_was_changed_is_made_again(study, capsys):
    study()
    capsys.readouterr()
    study()
    assert 'niceness: small' not in capsys.readouterr().out
    study("evaluations = {'niceness': dict(metrics={'niceness': 'accuracy/top1'}, arguments=('--other',))}\n")
    said = capsys.readouterr().out
    assert said.count('niceness: small') == 2 and 'training' not in said
    study("evaluations = {'niceness': dict(metrics={'AP': 'coco/bbox_mAP'}, arguments=('--other',))}\n")
    assert kept('LN').evaluations['niceness'] == {'coco/bbox_mAP': 1.0}
    with pytest.raises(SystemExit, match="'coco/bbox_AP'; nearest: coco/bbox_mAP"):
        study("evaluations = {'niceness': dict(metrics={'AP': 'coco/bbox_AP'})}\n")


def test_nothing_is_measured_on_a_model_that_is_not_trained_to_the_end(study):
    """This holds even if the record of another, finished training already exists."""
    study()
    for file in Path('work').rglob('*'):
        file.unlink() if file.is_file() else None
    Path('stop').touch()
    with pytest.raises(SystemExit, match='2 runs failed'):
        study(MORE)
    Path('stop').unlink()
    study(MORE)
    assert kept('LN').evaluations['model'] == kept('DTN').evaluations['model'] == {'coco/bbox_mAP': 1.0}


def test_a_run_does_not_go_on_with_another_config(study, capsys):
    Path('stop').touch()
    with pytest.raises(SystemExit):
        study()
    Path('stop').unlink()
    Path('config.py').write_text("norm = 'LN'\nlr = 2\n")
    with pytest.raises(SystemExit, match='LN-0 '):
        study()
    assert not Path('results').exists()


def test_a_record_of_another_config_is_named(study, capsys):
    study()
    Path('config.py').write_text("norm = 'LN'\nlr = 2\n")
    capsys.readouterr()
    study()
    said = capsys.readouterr().out
    assert 'another version' in said and '(results/small/LN-0.json): small, LN, seed 0' in said
    assert 'training' not in said


def test_a_run_that_fails_is_told_and_the_others_go_on(study, capsys):
    broken = "variants = {'LN': {'norm': 'none'}, 'DTN': {'norm': 'DTN'}}\n"
    with pytest.raises(SystemExit, match=r'small, LN, seed 0: tools/train\.py .*1: there is no norm none'):
        study(broken)
    assert 'FAILED small, LN, seed 0' in capsys.readouterr().out
    assert kept('DTN').curves['accuracy/top1'] == {2: 50.0} and not Path('results/small/LN-0.json').exists()


def test_a_metric_that_was_not_logged_is_named(study, capsys):
    wrong = "metrics = {'top-1': 'accuracy/top_1'}\n"
    with pytest.raises(SystemExit, match=r"LN-0 have no 'accuracy/top_1'; nearest: accuracy/top1"):
        study(wrong)
    assert not Path('results').exists()
    study()
    capsys.readouterr()
    study("metrics = {'top-1': 'accuracy/top1', 'top-5': 'accuracy/top5'}\n")
    said = capsys.readouterr().out
    assert 'top-5 in their logs: LN seed 0; DTN seed 0.' in said and '| DTN | 1 | 50.0 | +0.0 |' in said


@pytest.mark.skipif(sys.platform != 'linux', reason='elsewhere threads have no niceness of their own')
@pytest.mark.parametrize('own, runs', [(0, 10), (15, 15)])
def test_runs_are_nicer_than_others_and_never_less_nice_than_the_study(study, own, runs):
    if os.getpriority(os.PRIO_PROCESS, 0) > own:
        pytest.skip('the tests are nicer themselves')

    def at_this_niceness():
        os.setpriority(os.PRIO_PROCESS, 0, own)
        study()

    thread = threading.Thread(target=at_this_niceness)
    thread.start()
    thread.join()
    assert kept('DTN').evaluations['niceness'] == {'accuracy/top1': runs}
    assert json.loads(Path('results/small/DTN-0.json').read_text())['seed'] == 0
