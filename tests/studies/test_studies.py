"""Tests of reading studies, of the order and the selection of runs, and of the page of results."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from mmengine.config import Config
from PIL import Image

from mmdtn.datasets import write_classification
from mmdtn.errors import UserError
from mmdtn.studies import Record, Study, jobs, write_results
from mmdtn.studies.page import after_a_third
from mmdtn.studies.records import kept_curves, records
from tests.training import REPO, run_command, write_classifier
from tools.study import main

STUDY = """
title = 'A test'
config = '{config}'
metrics = {{'top-1': 'accuracy/top1'}}
variants = {{'LN': {{'model.backbone.norm_cfg.type': 'LN'}}, 'DTN': {{}}}}
seeds = (0, 1)
"""


def write_study(path: Path, config: Path | str = 'config.py', more: str = '') -> Path:
    path.write_text(STUDY.format(config=config) + more)
    return path


@pytest.fixture
def study(tmp_path):
    (tmp_path / 'config.py').write_text("model = dict(backbone=dict(norm_cfg=dict(type='DTN')))\n")
    return Study.read(write_study(tmp_path / 'small.py', tmp_path / 'config.py'))


def record(study, variant, seed, final, **more):
    curves = {'accuracy/top1': {1: final / 2, 2: final * 0.75, 3: final}, 'loss': {10: 2.0, 30: 1.0}, 'epoch': {30: 3}}
    fingerprint = study.fingerprint(variant, seed)
    return Record(study.name, variant, seed, fingerprint, '0.0', 2.5, 'a machine', curves=curves, **more)


def save(results, *found):
    for r in found:
        r.save(results / r.study / f'{r.variant}-{r.seed}.json')


def four(study):
    values = {('LN', 0): 50.0, ('LN', 1): 60.0, ('DTN', 0): 53.0, ('DTN', 1): 62.0}
    return [record(study, *key, value) for key, value in values.items()]


def test_a_study_runs_pairs_of_a_seed_together(study):
    order = [(job.variant, job.seed) for job in jobs(study)]
    assert order == [('LN', 0), ('DTN', 0), ('LN', 1), ('DTN', 1)]
    assert [(j.variant, j.seed) for j in jobs(study, ['DTN'], [1, 7])] == [('DTN', 1), ('DTN', 7)]
    with pytest.raises(UserError, match="no variant 'DNT'; nearest: DTN"):
        jobs(study, ['DNT'])


def test_few_seeds_of_some(tmp_path):
    study = Study.read(write_study(tmp_path / 'a.py', more="few = ('DTN',)\n"))
    assert [(j.variant, j.seed) for j in jobs(study)] == [('LN', 0), ('DTN', 0), ('LN', 1)]


def test_the_fingerprint_is_of_all_that_the_config_says(study, tmp_path):
    first = study.fingerprint('DTN', 0)
    assert (
        first == study.fingerprint('DTN', 0)
        and len({study.fingerprint(v, s) for v in study.variants for s in (0, 1)}) == 4
    )
    (tmp_path / 'base.py').write_text('lr = 1\n')
    (tmp_path / 'config.py').write_text("_base_ = 'base.py'\nmodel = dict(backbone=dict(norm_cfg=dict(type='DTN')))\n")
    second = study.fingerprint('DTN', 0)
    (tmp_path / 'base.py').write_text('lr = 2\n')
    assert len({first, second, study.fingerprint('DTN', 0)}) == 3


@pytest.mark.parametrize(
    'more, message',
    [
        ("baseline = 'RN'", "baseline='RN' .*; nearest: LN"),
        ('seed = 3', "'seed'; nearest: seeds"),
        ("variants = {'a/b': {}}", "'a/b' .*file name"),
        ("variants = {'LN': {'norm': {'type': 'LN'}}}", 'norm=.*command line'),
        ("variants = {'LN': {'name': 'two words'}}", "name='two words' .*command line"),
        ("evaluations = {'a': dict(tool='tools/tests.py')}", "'tools/tests.py' .*; nearest: tools/test.py"),
    ],
)
def test_a_wrong_study_is_told(tmp_path, more, message):
    with pytest.raises(UserError, match=message):
        Study.read(write_study(tmp_path / 'wrong.py', more=more + '\n'))


def test_a_file_that_is_no_study(tmp_path):
    (tmp_path / 'none.py').write_text("title = 'x'\n")
    with pytest.raises(UserError, match='config, metrics, variants'):
        Study.read(tmp_path / 'none.py')


def test_a_record_comes_back_as_it_was(study, tmp_path):
    first = record(study, 'DTN', 1, 60.0, evaluations={'2x': {'accuracy/top1': 3.5}})
    save(tmp_path, first)
    assert Record.load(tmp_path / 'small' / 'DTN-1.json') == first
    assert records(study, tmp_path) == {('DTN', 1): first}


def test_long_curves_are_kept_as_means(study, tmp_path):
    logs = tmp_path / 'run' / '20260101_000000' / 'vis_data'
    logs.mkdir(parents=True)
    lines = [dict(loss=float(i), epoch=1, iter=i, step=i) for i in range(1, 401)] + [
        {'accuracy/top1': 12.3456789, 'step': 1}
    ]
    (logs / 'scalars.json').write_text('\n'.join(map(json.dumps, lines)))
    kept = kept_curves(study, tmp_path / 'run')
    assert len(kept['loss']) == 40 and kept['loss'][10] == 5.5 and kept['loss'][400] == 395.5
    assert kept['accuracy/top1'] == {1: 12.346}


def test_where_nothing_was_found_ap_is_zero(study, tmp_path):
    """MMDetection's metric does not log AP for an evaluation without detections."""
    study = dataclasses.replace(study, metrics={'box AP': 'coco/bbox_mAP'})
    logs = tmp_path / 'run' / '20260101_000000' / 'vis_data'
    logs.mkdir(parents=True)
    lines = [dict(loss=1.0, iter=9, step=9), dict(time=0.1, step=1), {'coco/bbox_mAP': 0.25, 'time': 0.1, 'step': 2}]
    (logs / 'scalars.json').write_text('\n'.join(map(json.dumps, lines)))
    assert kept_curves(study, tmp_path / 'run')['coco/bbox_mAP'] == {1: 0.0, 2: 0.25}


def test_the_table(study, tmp_path):
    save(tmp_path, *four(study))
    page = tmp_path / 'page.md'
    page.write_text('before\n<!-- start of study small -->\nold\n<!-- end of study small -->\nafter\n')
    section = write_results(study, tmp_path, page)
    assert page.read_text().startswith('before\n') and page.read_text().endswith('after\n')
    assert section in page.read_text() and 'old' not in page.read_text()
    # Differences 3 and 2: mean 2.5, standard deviation 0.71, Student's 2.5 +- 12.706 * 0.7071 / sqrt 2.
    row = next(line for line in section.splitlines() if line.startswith('| DTN'))
    cells = [cell.strip() for cell in row.strip('|').split('|')]
    assert cells[:6] == ['DTN', '2', '57.5 ± 6.4', '+2.5 ± 0.7', '+2.0 to +3.0', '-3.9 to +8.9']
    assert cells[6:] == ['28.8 ± 3.2', '+1.2 ± 0.4', '43.1 ± 4.8', '+1.9 ± 0.5']
    # The table of chi2 puts the variance of two values between 1/5.02 and 1/0.000982 times their sample variance.
    assert ' 0.71 points' in section and ' 0.32 to 22.56' in section
    assert ' 7 seeds per variant' in section and ' 4 and ' in section
    assert 'not finished yet' not in section and 'another version' not in section
    assert Image.open(tmp_path / 'small' / 'curves.png').width == 720


def test_what_is_missing_or_of_another_config_is_said(study, tmp_path):
    first, *_ = four(study)
    first.fingerprint = 'older'
    save(tmp_path, first)
    section = write_results(study, tmp_path)
    assert 'not finished yet: LN seed 1; DTN seeds 0, 1.' in section
    assert 'another version of the config: LN seed 0.' in section
    assert 'compared with LN' in section and '1 run took 2 minutes' in section
    save(tmp_path, *four(study)[2:])
    section = write_results(study, tmp_path)
    assert 'One seed ' in section and '3 runs took 2 minutes' in section


def test_evaluations_that_share_a_title_share_a_table(tmp_path):
    (tmp_path / 'config.py').write_text('model = dict(backbone=dict(norm_cfg=dict()))\n')
    more = "evaluations = {name: dict(title='Sizes', options={'size': name}) for name in ('1x', '2x')}\n"
    study = Study.read(write_study(tmp_path / 'small.py', tmp_path / 'config.py', more))
    found = four(study)
    for r, (one, two) in zip(found, [(50, 40), (60, 50), (53, 45), (62, 57)], strict=True):
        r.evaluations = {'1x': {'accuracy/top1': one}, '2x': {'accuracy/top1': two}}
        r.measured = {name: evaluation.fingerprint for name, evaluation in study.evaluations.items()}
    found[-1].evaluations.pop('2x')
    save(tmp_path, *found)
    section = write_results(study, tmp_path)
    assert '|  | 1x: top-1 | 2x: top-1 |' in section and 'Sizes:' in section
    assert '| DTN | 57.5 ± 6.4 (+2.5 ± 0.7) | 45.0 (+5.0) |' in section
    assert '(2x): DTN seed 1.' in section and '(1x)' not in section


def test_after_a_third_of_the_schedule():
    assert after_a_third({1: 0.1, 2: 0.2, 3: 0.3, 4: 0.4}) == 0.2
    assert after_a_third({400: 0.1, 800: 0.2, 1200: 0.3}) == 0.1


@pytest.fixture(scope='module')
def place(tmp_path_factory):
    """Returns the folder and the file of a study with two runs and one evaluation."""
    root = tmp_path_factory.mktemp('study')
    data = write_classification(root / 'data', train=10, val=10)
    config = write_classifier(root / 'config.py', data, 'train_cfg = dict(max_epochs=2, val_interval=1)\n')
    more = "seeds = (4,)\nevaluations = {'tested': dict(options={'test_dataloader.batch_size': 5})}\n"
    return root, write_study(root / 'tiny.py', config, more)


def arguments(root, study, *more):
    folders = ['--results', root / 'results', '--work-dir', root / 'work', '--page', root / 'page.md']
    return [str(word) for word in [study, *folders, *more]]


@pytest.mark.slow
def test_runs_are_done_once_and_measured_as_tools_do(place, capsys, monkeypatch):
    root, study = place
    monkeypatch.chdir(REPO)
    main(arguments(root, study, '--processes', '2'))
    said = capsys.readouterr().out
    assert said.count('finished:') == 2 and '| DTN | 1 |' in said
    found = records(Study.read(study), root / 'results')
    assert set(found) == {('LN', 4), ('DTN', 4)}
    for (variant, _), r in found.items():
        assert list(r.curves['accuracy/top1']) == [1, 2] and r.core_minutes > 0 and 'loss' in r.curves
        assert r.evaluations['tested'] == {'accuracy/top1': r.curves['accuracy/top1'][2]}
        config = (root / 'work' / 'tiny' / f'{variant}-4' / 'config.py').read_text()
        assert f"type='{variant}'" in config and 'seed=4' in config
    main(arguments(root, study))
    said = capsys.readouterr().out
    assert said.count('skipping finished run:') == 2 and 'training' not in said
    # A missing evaluation of a record is made with the existing checkpoint.
    path = root / 'results' / 'tiny' / 'LN-4.json'
    content = json.loads(path.read_text())
    whole = path.read_text()
    content['evaluations'] = {}
    path.write_text(json.dumps(content))
    main(arguments(root, study))
    said = capsys.readouterr().out
    assert 'training' not in said and 'tested: tiny, LN, seed 4' in said and path.read_text() == whole


@pytest.mark.slow
def test_a_study_that_is_stopped_takes_its_trainings_along_and_goes_on_later(place, tmp_path):
    """The results equal those of a study that was not stopped."""
    root, _ = place
    study = write_study(tmp_path / 'stopped.py', root / 'config.py', "seeds = (4,)\nvariants = {'LN': {}}\n")
    command = [sys.executable, 'tools/study.py', *arguments(tmp_path, study, '--processes', '1')]
    env = dict(os.environ, PYTHONPATH=str(REPO), OMP_NUM_THREADS='1', CUDA_VISIBLE_DEVICES='')
    running = subprocess.Popen(command, cwd=REPO, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    work = tmp_path / 'work' / 'stopped' / 'LN-4'
    deadline = time.monotonic() + 300
    while not (work / 'epoch_1.pth').exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    running.send_signal(signal.SIGTERM)
    _, errors = running.communicate(timeout=60)
    assert running.returncode != 0 and 'stopped' in errors, errors
    assert not subprocess.run(['pgrep', '-f', f'work-dir {work}'], capture_output=True).stdout
    assert not (tmp_path / 'results').exists() or not list((tmp_path / 'results').rglob('*.json'))
    said = run_command(*command, cwd=REPO).stdout
    assert 'resuming training: stopped, LN, seed 4' in said and 'finished' in said
    again = write_study(tmp_path / 'whole.py', root / 'config.py', "seeds = (4,)\nvariants = {'LN': {}}\n")
    run_command(sys.executable, 'tools/study.py', *arguments(tmp_path, again), cwd=REPO)
    first, second = (Record.load(tmp_path / 'results' / name / 'LN-4.json') for name in ('stopped', 'whole'))
    # The run may have been killed during its first validation, which is not repeated.
    assert first.curves['accuracy/top1'][2] == second.curves['accuracy/top1'][2] and first.core_minutes is None


def test_each_variant_may_have_a_baseline_of_its_own_and_a_published_figure(tmp_path):
    (tmp_path / 'config.py').write_text("model = dict(norm='LN')\n")
    variants = {f'{model} {norm}': {'model.norm': f'{model}{norm}'} for model in 'AB' for norm in ('LN', 'DTN')}
    baseline = {variant: f'{variant[0]} LN' for variant in variants}
    more = f"variants = {variants}\nbaseline = {baseline}\npublished = {{'B LN': 36.7, 'B DTN': 37.5}}\n"
    study = Study.read(write_study(tmp_path / 'own.py', tmp_path / 'config.py', more))
    assert [study.baseline_of(variant) for variant in variants] == [None, 'A LN', None, 'B LN']
    finals = zip(variants, (50, 51, 30, 34), strict=True)
    save(tmp_path, *(record(study, variant, 0, final) for variant, final in finals))
    lines = write_results(study, tmp_path).splitlines()
    rows = [[cell.strip() for cell in line.strip('|').split('|')] for line in lines]
    found = {row[0]: (row[3], row[-1]) for row in rows if len(row) > 3}
    assert found['top-1 %'] == ('less baseline', 'the paper')
    assert found['A DTN'] == ('+1.0', '') and found['B DTN'] == ('+4.0', '37.5') and found['B LN'] == ('', '36.7')
    with pytest.raises(UserError, match="published='C LN'"):
        Study.read(write_study(tmp_path / 'wrong.py', more=more + "published = {'C LN': 1.0}\n"))


STUDIES = sorted((REPO / 'configs' / 'studies').glob('*.py'))


@pytest.mark.slow
@pytest.mark.parametrize('file', [f for f in STUDIES if 'variants' in f.read_text()], ids=lambda f: f.stem)
def test_the_studies_of_this_package_and_their_page(file, tmp_path, monkeypatch):
    """The page is up to date with the records."""
    monkeypatch.chdir(REPO)
    study = Study.read(file)
    assert {study.baseline_of(variant) for variant in study.variants} <= {None, *study.variants}
    assert Path(study.config).exists()
    assert len({study.fingerprint(variant, 0) for variant in study.variants}) == len(study.variants)
    # By default mmengine logs metrics at the step of the epoch, so all metrics of a short run would be at step 0.
    cfg = Config.fromfile(study.config)
    assert 'max_epochs' in cfg.train_cfg or cfg.default_hooks.logger.log_metric_by_epoch is False
    found = records(study, REPO / 'docs' / 'evidence')
    if found:
        for r in found.values():
            r.save(tmp_path / study.name / f'{r.variant}-{r.seed}.json')
        assert write_results(study, tmp_path) in (REPO / 'docs' / 'evidence.md').read_text(), (
            'python tools/study.py --report'
        )


@pytest.mark.slow
def test_robustness_is_an_evaluation_like_others(place, tmp_path, monkeypatch, capsys):
    """The robustness tool writes another file of results than tools/test.py."""
    root, _ = place
    monkeypatch.chdir(REPO)
    more = """seeds = (4,)
variants = {'LN': {'model.backbone.norm_cfg.type': 'LN'}}
evaluations = {'fog': dict(tool='tools/analysis_tools/test_robustness.py', metrics={'mean': 'mean_error'},
                           arguments=('--corruptions', 'fog', '--severities', '5'))}
"""
    study = write_study(tmp_path / 'foggy.py', root / 'config.py', more)
    main(arguments(tmp_path, study))
    (summary,) = (tmp_path / 'work' / 'foggy' / 'LN-4').glob('fog-*/summary.json')
    measured = json.loads(summary.read_text())['config']
    kept = records(Study.read(study), tmp_path / 'results')['LN', 4].evaluations['fog']
    assert kept == {'mean_error': measured['mean_error']} and 'fog:' in capsys.readouterr().out
