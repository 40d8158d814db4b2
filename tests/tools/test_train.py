"""Tests tools/train.py: one-line errors, options, logs and the dry run."""

import errno
import importlib
import json
import os
import re
import signal
import sys
from io import StringIO
from pathlib import Path
from subprocess import PIPE, Popen

import mmpretrain
import pytest
import torch
from mmengine.config import Config
from mmengine.hooks import CheckpointHook, EMAHook
from mmengine.runner import EpochBasedTrainLoop, IterBasedTrainLoop
from mmengine.visualization import TensorboardVisBackend
from safetensors.torch import save_file

from mmdtn.datasets import write_classification, write_coco
from mmdtn.engine.hooks import StopOnNonFiniteHook
from mmdtn.engine.launch import add_runtime
from mmdtn.errors import UserError
from mmdtn.models import build, read_config
from tests.training import REPO, run_command, run_tool, write_classifier, write_detector
from tools.analysis_tools import browse_dataset
from tools.train import RUNTIME, configure, main, parse_args


@pytest.fixture(scope='module')
def data(tmp_path_factory):
    root = tmp_path_factory.mktemp('data')
    write_classification(root / 'classes', train=10, val=5)
    write_coco(root / 'coco', train=4, val=2, sides=(64, 80))
    return root


@pytest.fixture
def classifier(tmp_path, data):
    return write_classifier(tmp_path / 'classifier.py', data / 'classes')


@pytest.fixture
def detector(tmp_path, data):
    return write_detector(tmp_path / 'detector.py', data / 'coco')


@pytest.mark.slow
@pytest.mark.parametrize(
    ('change', 'expected'),
    [
        ('model.backbone.type=PVTDTM', r"type='PVTDTM' is not registered: .*; nearest: PVTDTN"),
        ('model.backbone.arch=tinny', r"arch='tinny'.*; nearest: tiny"),
        ('model.backbone.norm_cfg.type=DTM', r"type='DTM' is not registered: .*; nearest: .*DTN"),
        ('model.backbone.norm_cfg.num_head=2', r"DTN\.__init__\(\) .*'num_head'"),
        ('model.backbone.norm_cfg.num_heads=3', 'num_heads=3 does not divide num_features=16'),
        ('optim_wrapper.optimizer.type=AdamWW', r"type='AdamWW' is not registered: .*; nearest: AdamW"),
        ('param_scheduler.0.type=LinearLRR', r"type='LinearLRR' is not registered: .*; nearest: LinearLR"),
        (
            'train_dataloader.dataset.type=CustomDateset',
            "type='CustomDateset' is not registered.*; nearest: CustomDataset",
        ),
        (
            'train_dataloader.dataset.data_root={data}/clases',
            r"{data}/clases/train does not exist: there is no 'clases' in {data}; nearest: classes",
        ),
    ],
)
def test_a_wrong_config_is_one_line(tmp_path, data, classifier, change, expected):
    with pytest.raises(SystemExit) as stopped:
        main([str(classifier), '--work-dir', str(tmp_path / 'work'), '--cfg-options', change.format(data=data)])
    message = stopped.value.code
    assert isinstance(message, str), 'an exit code other than 0, and the text on stderr'
    assert message.startswith('error: ') and '\n' not in message
    assert re.search(expected.format(data=data), message), message


def test_debug_shows_the_traceback(tmp_path, classifier):
    wrong = [str(classifier), '--work-dir', str(tmp_path), '--cfg-options', 'model.backbone.type=PVTDTM']
    with pytest.raises(SystemExit, match=r'nearest: PVTDTN.*--debug'):
        main(wrong)
    with pytest.raises(KeyError, match='PVTDTM'):
        main([*wrong, '--debug'])


def test_a_missing_annotation_file_and_a_missing_config(tmp_path, data, detector):
    wrong = f'train_dataloader.dataset.data_root={data}/koko'
    with pytest.raises(SystemExit, match=rf"there is no 'koko' in {data}; nearest: coco"):
        main([str(detector), '--work-dir', str(tmp_path / 'work'), '--cfg-options', wrong])
    with pytest.raises(SystemExit, match=r'detectr\.py does not exist; nearest: detector\.py'):
        main([str(tmp_path / 'detectr.py')])
    broken = tmp_path / 'broken.py'
    broken.write_text('model = dict(\n')
    with pytest.raises(SystemExit, match=r"^error: [^\n]*broken\.py: line 1, 'model = dict\(': [^\n]*$"):
        main([str(broken)])
    broken.write_text('\nmodel = dict(depth=deep)')
    inherits = tmp_path / 'inherits.py'
    inherits.write_text("_base_ = 'broken.py'")
    with pytest.raises(SystemExit, match=r"^error: [^\n]*broken\.py, line 2: name 'deep' is not defined$"):
        main([str(inherits)])
    with pytest.raises(SystemExit, match=r'lost\.pth does not exist'):
        main([str(detector), '--resume', str(tmp_path / 'lost.pth')])


def test_an_error_of_the_code_keeps_its_traceback(tmp_path, classifier, monkeypatch):
    monkeypatch.setattr('tools.train.check_data', lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main([str(classifier), '--work-dir', str(tmp_path / 'work')])


@pytest.mark.slow
def test_the_exit_code_and_the_last_line(tmp_path, classifier):
    done = run_tool('train.py', classifier, '--cfg-options', 'model.head.type=LinearHead', cwd=tmp_path, check=False)
    assert done.returncode == 1 and 'Traceback' not in done.stderr
    assert 'nearest: LinearClsHead' in done.stderr.strip().splitlines()[-1]


@pytest.mark.slow
def test_ctrl_c_says_how_to_go_on(tmp_path, classifier):
    command = [sys.executable, str(REPO / 'tools' / 'train.py'), str(classifier), '--work-dir', str(tmp_path / 'work')]
    options = ['--cfg-options', 'train_cfg.max_epochs=10000', 'default_hooks.checkpoint.interval=10000']
    environment = dict(os.environ, PYTHONPATH=str(REPO), PYTHONUNBUFFERED='1')

    def accept_ctrl_c():  # shells let their background jobs ignore it
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    with Popen(
        [*command, *options],
        cwd=tmp_path,
        env=environment,
        stdout=PIPE,
        stderr=PIPE,
        text=True,
        preexec_fn=accept_ctrl_c,
    ) as training:
        next(line for line in training.stdout if 'Epoch(train)' in line or 'Epoch(val)' in line)
        training.send_signal(signal.SIGINT)
        _, errors = training.communicate(timeout=60)
    assert training.returncode == 130
    assert re.match('error: stopped; .*--resume', errors.strip().splitlines()[-1])
    assert 'Traceback' not in errors


def test_ctrl_c_ends_other_tools_with_the_same_code(tmp_path, classifier, monkeypatch, capsys):
    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr('tools.analysis_tools.browse_dataset.browse', interrupted)
    with pytest.raises(SystemExit) as stopped:
        browse_dataset.main([str(classifier), '--out', str(tmp_path)])
    assert stopped.value.code == 130 and capsys.readouterr().err == 'error: stopped.\n'
    with pytest.raises(KeyboardInterrupt):
        browse_dataset.main([str(classifier), '--out', str(tmp_path), '--debug'])


@pytest.mark.parametrize(
    ('tool', 'work', 'arguments'),
    [
        ('dataset_converters.make_shapes', 'run', []),
        ('model_converters.publish_model', 'run', ['a.pth', 'b.pth']),
        ('model_converters.convert', 'convert', ['a.pth', '--to', 'tiny', '--out', 'b.pth']),
        ('analysis_tools.benchmark_norm', 'run', []),
        ('demo', 'run', []),
    ],
)
def test_ctrl_c_ends_tools_without_a_config_with_the_same_code(tool, work, arguments, monkeypatch, capsys):
    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setitem(os.environ, 'CUDA_VISIBLE_DEVICES', '')  # as the demo sets it
    module = importlib.import_module(f'tools.{tool}')
    monkeypatch.setattr(module, work, interrupted)
    monkeypatch.setattr('sys.argv', [tool, *arguments])
    with pytest.raises(SystemExit) as stopped:
        module.main()
    assert stopped.value.code == 130 and capsys.readouterr().err == 'error: stopped.\n'


def test_a_full_disk_is_one_line_and_the_run_goes_on_from_the_last_checkpoint(tmp_path, classifier, monkeypatch):
    first, fsync = tmp_path / 'work' / 'epoch_1.pth', os.fsync

    def full(file):
        if first.exists() and os.fstat(file).st_size > 2**16:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(file)

    monkeypatch.setattr(os, 'fsync', full)
    options = ['--cfg-options', 'train_cfg.val_interval=9']
    with pytest.raises(SystemExit) as stopped:
        main([str(classifier), '--work-dir', str(tmp_path / 'work'), *options])
    message = stopped.value.code
    assert re.fullmatch(
        rf'error: {tmp_path}/work/epoch_2\.pth cannot be written because the disk is full\. .* [1-9]\S* MB.* '
        rf'[1-9]\S* MB.* {first}, .*--resume.*',
        message,
    ), message
    assert sorted(path.name for path in first.parent.glob('*.pth*')) == ['epoch_1.pth']
    monkeypatch.undo()
    main([str(classifier), '--work-dir', str(tmp_path / 'work'), '--resume', *options])
    assert (tmp_path / 'work' / 'epoch_2.pth').exists()


@pytest.mark.slow
def test_a_checkpoint_larger_than_files_may_be(tmp_path, classifier):
    command = f'ulimit -f 100; exec {sys.executable} {REPO}/tools/train.py {classifier} --work-dir work'
    done = run_command('bash', '-c', command, cwd=tmp_path, check=False)
    assert done.returncode == 1 and 'Traceback' not in done.stderr
    message = done.stderr.strip().splitlines()[-1]
    assert 'epoch_1.pth cannot be written' in message and 'ulimit -f' in message and 'no checkpoint before' in message


def test_an_option_that_the_config_does_not_know_is_told(classifier):
    with pytest.raises(UserError, match=r"trian_cfg\.max_epochs: .* has no 'trian_cfg'; nearest: train_cfg"):
        configure(parse_args([str(classifier), '--cfg-options', 'trian_cfg.max_epochs=3']))


def test_flags(tmp_path, classifier, detector):
    cfg = configure(parse_args([str(classifier), '--amp', '--auto-scale-lr', '--work-dir', str(tmp_path / 'w')]))
    assert cfg.work_dir == str(tmp_path / 'w') and cfg.auto_scale_lr.enable
    assert cfg.optim_wrapper.type == ('AmpOptimWrapper' if torch.cuda.is_available() else 'BFloat16OptimWrapper')
    assert configure(parse_args([str(detector)])).work_dir == 'work_dirs/detector'
    cfg = configure(parse_args([str(detector), '--cfg-options', 'train_cfg.max_epochs=7', 'model.neck.num_outs=6']))
    assert (cfg.train_cfg.max_epochs, cfg.model.neck.num_outs) == (7, 6)
    no_base = tmp_path / 'no_base.py'
    no_base.write_text(f"_base_ = '{classifier}'\nauto_scale_lr = dict(_delete_=True)")
    with pytest.raises(SystemExit, match=r'no auto_scale_lr\.base_batch_size'):
        main([str(no_base), '--auto-scale-lr'])


@pytest.mark.parametrize(
    'config', ['mmdet::faster_rcnn/faster-rcnn_r50_fpn_1x_coco.py', 'mmpretrain::resnet/resnet18_8xb32_in1k.py']
)
def test_a_config_of_any_package_gets_our_runtime_and_a_line_says_each_thing(tmp_path, config, capsys):
    path = tmp_path / 'theirs.py'
    path.write_text(f"_base_ = '{config}'")
    cfg = configure(parse_args([str(path), '--strict']))
    said = [line.removeprefix('runtime.py: ') for line in capsys.readouterr().out.splitlines()]
    hooks = {hook['type']: hook for hook in cfg.custom_hooks}
    assert hooks.keys() >= {'StopOnNonFiniteHook', 'SkipBrokenImagesHook', 'PendingGradientsHook'}
    assert hooks['SkipBrokenImagesHook']['strict']
    assert cfg.default_hooks.checkpoint.type == 'WholeCheckpointHook' and cfg.default_hooks.checkpoint.interval == 1
    assert cfg.train_cfg.type == 'ResumableLoop' and cfg.custom_imports.imports == ['mmdtn']
    assert [backend['type'] for backend in cfg.visualizer.vis_backends] == ['LocalVisBackend', 'TensorboardVisBackend']
    names = ['ResumableLoop', 'WholeCheckpointHook', *hooks, 'TensorboardVisBackend', 'mmdtn']
    assert len(said) == len(names) and all(name in line for name, line in zip(names, said, strict=True))
    as_written = configure(parse_args([str(path), '--as-written', '--work-dir', cfg.work_dir]))
    assert capsys.readouterr().out == ''
    original = Config.fromfile(path)
    original.merge_from_dict(dict(launcher='none', work_dir=cfg.work_dir))
    assert as_written.to_dict() == original.to_dict()


@pytest.mark.slow
@pytest.mark.parametrize('loop', ['max_epochs=2, val_interval=1', "_delete_=True, type='ResumableLoop', max_iters=5"])
def test_the_tool_of_another_package_trains_the_same(tmp_path, data, loop):
    """The results are bitwise equal, with the same loop, hooks and files, because the config defines all of them."""
    config = write_classifier(tmp_path / 'it.py', data / 'classes', f'\ntrain_cfg = dict({loop})\n')
    if 'by_epoch' in loop:
        config.write_text(
            config.read_text().replace('_delete_=True, by_epoch=False', "_delete_=True, type='ResumableLoop'")
        )
    theirs = Path(mmpretrain.__file__).parent / '.mim' / 'tools' / 'train.py'
    run_command(sys.executable, theirs, config, '--work-dir', tmp_path / 'theirs', cwd=tmp_path)
    main([str(config), '--work-dir', str(tmp_path / 'ours')])
    files = [sorted(path.name for path in (tmp_path / who).glob('*.pth')) for who in ('ours', 'theirs')]
    assert files[0] == files[1] and files[0]
    ours, other = (torch.load(tmp_path / who / files[0][-1], weights_only=False) for who in ('ours', 'theirs'))
    assert all(torch.equal(value, other['state_dict'][key]) for key, value in ours['state_dict'].items())
    assert [*tmp_path.glob('theirs/*/vis_data/events*')] and (tmp_path / 'theirs' / 'last_validation').exists()


@pytest.mark.parametrize(
    'name',
    [lambda kind: kind.__name__, lambda kind: f'mmengine.{kind.__name__}', lambda kind: kind],
    ids=['name', 'scope', 'class'],
)
def test_a_type_is_recognised_however_it_is_named(name):
    """The type can be ``'X'``, ``'scope.X'`` or the class itself."""
    cfg = Config(
        dict(
            default_hooks=dict(checkpoint=dict(type=name(CheckpointHook), interval=3)),
            train_cfg=dict(type=name(IterBasedTrainLoop), max_iters=5),
            custom_hooks=[dict(type=name(StopOnNonFiniteHook)), dict(type=name(EMAHook))],
            visualizer=dict(type='Visualizer', vis_backends=[dict(type=name(TensorboardVisBackend))]),
        )
    )
    add_runtime(cfg, RUNTIME)
    assert cfg.default_hooks.checkpoint == dict(type='WholeCheckpointHook', interval=3)
    assert cfg.train_cfg == dict(type='ResumableLoop', max_iters=5)
    hooks = [hook.type for hook in cfg.custom_hooks]
    assert hooks[:2] == [name(StopOnNonFiniteHook), name(EMAHook)]
    added = ['CheckClassesHook', 'MissedValidationHook', 'PendingGradientsHook', 'ProgressHook', 'SkipBrokenImagesHook']
    assert sorted(hooks[2:]) == added
    assert [backend.type for backend in cfg.visualizer.vis_backends] == [name(TensorboardVisBackend), 'LocalVisBackend']
    assert add_runtime(cfg, RUNTIME) == [], 'all of it is there'


def test_loops_of_others_stay():
    cfg = Config(dict(train_cfg=dict(type='TheirLoop', max_epochs=3)))
    with pytest.raises(KeyError, match='TheirLoop'):
        add_runtime(cfg, RUNTIME)
    cfg.train_cfg.type = TheirLoop
    add_runtime(cfg, RUNTIME)
    assert cfg.train_cfg == dict(type=TheirLoop, max_epochs=3)


class TheirLoop(EpochBasedTrainLoop):
    pass


def test_resume_takes_what_is_there(tmp_path, classifier, capsys):
    pretrained = tmp_path / 'pretrained.pth'
    arguments = [
        str(classifier),
        '--resume',
        '--work-dir',
        str(tmp_path / 'work'),
        '--cfg-options',
        f'load_from={pretrained}',
    ]
    cfg = configure(parse_args(arguments))
    assert (cfg.resume, cfg.load_from) == (False, str(pretrained)), 'a first start loads what the config says'
    assert 'from the beginning' in capsys.readouterr().out
    (tmp_path / 'work').mkdir()
    torch.save(dict(meta={}, state_dict={}, optimizer={}), tmp_path / 'work' / 'epoch_3.pth')
    (tmp_path / 'work' / 'last_checkpoint').write_text('epoch_4.pth')
    cfg = configure(parse_args(arguments))
    assert (cfg.resume, cfg.load_from) == (True, str(tmp_path / 'work' / 'epoch_3.pth'))
    elsewhere = tmp_path / 'out' / 'work'
    elsewhere.mkdir(parents=True)
    (tmp_path / 'work' / 'epoch_3.pth').rename(elsewhere / 'epoch_3.pth')
    cfg = configure(parse_args([*arguments, f'default_hooks.checkpoint.out_dir={tmp_path / "out"}']))
    assert (cfg.resume, cfg.load_from) == (True, str(elsewhere / 'epoch_3.pth'))


def test_resume_does_not_start_over_beside_checkpoints(tmp_path, classifier):
    work = tmp_path / 'work'
    work.mkdir()
    torch.save(dict(meta={}, state_dict={}), work / 'epoch_3.pth')
    arguments = [str(classifier), '--resume', '--work-dir', str(work)]
    with pytest.raises(UserError, match=r'optimizer.*--work-dir'):
        configure(parse_args(arguments))
    (work / 'epoch_3.pth').unlink()
    (work / 'global_step3').mkdir()  # like the folders of DeepSpeed
    (work / 'last_checkpoint').write_text(str(work / 'global_step3'))
    assert configure(parse_args(arguments)).load_from == str(work / 'global_step3')


@pytest.mark.slow
def test_resume_refuses_another_model(tmp_path, classifier):
    train = [str(classifier), '--work-dir', str(tmp_path / 'work'), '--cfg-options', 'train_cfg.max_epochs=1']
    main(train)
    with pytest.raises(SystemExit, match=r'epoch_1\.pth is not a checkpoint .*size mismatch for head\.fc\.weight'):
        main([*train, 'train_cfg.max_epochs=2', 'model.head.num_classes=4', 'experiment_name=other', '--resume'])


class Terminal(StringIO):
    def isatty(self):
        return True


@pytest.mark.slow
def test_progress_logs_and_tensorboard(tmp_path, classifier, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    work = tmp_path / 'work'
    screen = Terminal()
    monkeypatch.setattr(sys, 'stdout', screen)
    main([str(classifier), '--work-dir', str(work)])
    drawn = screen.getvalue()
    assert re.search(r'train: 100%\|[█#]+\| 6/6 \[.*, epoch=2/2, loss=\d\.\d+, lr=[\d.e-]+\]\n', drawn)
    assert re.search(r'val:.* [012]/2 \[', drawn)
    (log,) = work.glob('*/*.log')
    assert '\r' not in log.read_text() and '\x1b' not in log.read_text() and 'Epoch(train) [2][3/3]' in log.read_text()
    (events,) = work.glob('*/vis_data/events.*')
    accumulator = EventAccumulator(str(events))
    accumulator.Reload()
    losses = [json.loads(line) for line in next(work.glob('*/vis_data/scalars.json')).read_text().splitlines()]
    shown = [event.value for event in accumulator.Scalars('loss')]
    assert shown == pytest.approx([line['loss'] for line in losses if 'loss' in line], rel=1e-5) and len(shown) == 6


@pytest.mark.slow
@pytest.mark.parametrize('kind', ['classifier', 'detector'])
def test_dry_run_reports_and_leaves_nothing(tmp_path, kind, request, capsys, monkeypatch):
    config = request.getfixturevalue(kind)
    monkeypatch.chdir(tmp_path)
    before = sorted(os.listdir(tmp_path))
    main(
        [
            str(config),
            '--dry-run',
            '--cfg-options',
            'train_cfg.max_epochs=50',
            'train_cfg.val_interval=20',
            'train_dataloader.batch_size=1',
            'train_dataloader.batch_sampler=None',
            'default_hooks.checkpoint.out_dir=out',
            'default_hooks.checkpoint.by_epoch=False',
            'default_hooks.checkpoint.interval=1',
        ]
    )
    report = capsys.readouterr().out
    steps, batches = (500, 2) if kind == 'classifier' else (200, 1)
    found = re.search(rf'training step: ([\d.]+) s, {steps} steps in 50 epochs', report)
    validation = re.search(rf'validation step: ([\d.]+) s, {batches} steps in each of 3 validations', report)
    hours, minutes, seconds = map(int, re.search(r'the whole run: (\d+):(\d+):(\d+)', report).groups())
    assert re.search(r'peak memory: \d+\.\d\d GB', report)
    expected = float(found[1]) * steps + float(validation[1]) * batches * 3
    assert hours * 3600 + minutes * 60 + seconds == pytest.approx(expected, abs=1.5)
    assert sorted(os.listdir(tmp_path)) == before
    assert report.count('Epoch(train)') == 6


@pytest.mark.slow
def test_one_slow_step_does_not_lengthen_what_a_dry_run_predicts(tmp_path, classifier, capsys):
    classifier.write_text(
        classifier.read_text() + "custom_hooks = [dict(type='tests.engine.spoil.SlowStep', number=2)]"
    )
    main([str(classifier), '--dry-run'])
    assert float(re.search(r'training step: ([\d.]+) s', capsys.readouterr().out)[1]) < 2


def test_weights_that_do_not_fit_are_one_line(tmp_path, classifier):
    torch.save(dict(a=torch.ones(1)), tmp_path / 'other.pth')
    start = f"model['backbone']['init_cfg'] = dict(type='Pretrained', checkpoint='{tmp_path / 'other.pth'}'"
    cases = {'': r'other\.pth .*PVTDTN: Tried', ', warmstart=1': "no option 'warmstart'; nearest: warm_start"}
    for more, message in cases.items():
        config = tmp_path / 'start.py'
        config.write_text(classifier.read_text() + f'\n{start}{more})\n')
        with pytest.raises(SystemExit, match=rf'^error: (.*{message}[^\n]*)$'):
            main([str(config), '--work-dir', str(tmp_path / 'work')])


@pytest.mark.slow
def test_a_dry_run_measures_too(tmp_path, classifier):
    """With five classes, top-6 accuracy is not defined."""
    with pytest.raises(ValueError, match=r'Top-\d+ accuracy is unavailable'):
        main([str(classifier), '--dry-run', '--cfg-options', 'val_evaluator.topk=(1,6)'])


@pytest.mark.parametrize('script', ['dist_train.sh', 'dist_test.sh', 'slurm_train.sh', 'slurm_test.sh'])
def test_scripts_say_how_they_are_called(tmp_path, script):
    done = run_tool(script, cwd=tmp_path, check=False)
    assert done.returncode == 2 and 'usage:' in done.stderr


def stand_in(folder: Path, name: str) -> None:
    """Writes a program that records how it was called."""
    program = folder / name
    program.write_text('#!/bin/sh\nfor a in "$@"; do echo "$a"; done > called.txt\n')
    program.chmod(0o755)


def test_slurm_scripts_call_srun(tmp_path):
    stand_in(tmp_path, 'srun')
    path = f'{tmp_path}:{os.environ["PATH"]}'
    run_tool(
        'slurm_train.sh',
        'part',
        'job',
        'a config.py',
        'work dir',
        '--resume',
        cwd=tmp_path,
        PATH=path,
        GPUS='16',
        SRUN_ARGS='--time=1:00:00 --exclusive',
    )
    called = (tmp_path / 'called.txt').read_text().splitlines()
    assert called[:2] == ['-p', 'part']
    assert {'--job-name=job', '--gres=gpu:8', '--ntasks=16', '--ntasks-per-node=8'} <= set(called)
    assert {'--time=1:00:00', '--exclusive'} <= set(called)
    tail = ['a config.py', '--work-dir', 'work dir', '--launcher', 'slurm', '--resume']
    assert called[-7:] == [f'{REPO}/tools/train.py', *tail]
    run_tool(
        'slurm_test.sh',
        'part',
        'job',
        'c.py',
        'x.pth',
        '--out',
        'o.pkl',
        cwd=tmp_path,
        PATH=path,
        GPUS='4',
        GPUS_PER_NODE='0',
        TASKS_PER_NODE='2',
    )
    called = (tmp_path / 'called.txt').read_text().splitlines()
    assert not [word for word in called if word.startswith('--gres')] and '--ntasks-per-node=2' in called
    assert called[-7:] == [f'{REPO}/tools/test.py', 'c.py', 'x.pth', '--launcher', 'slurm', '--out', 'o.pkl']


def test_dist_scripts_pass_nodes_and_addresses_on(tmp_path):
    stand_in(tmp_path, 'fake_python')
    run_tool(
        'dist_train.sh',
        'a config.py',
        4,
        '--amp',
        cwd=tmp_path,
        NNODES='3',
        NODE_RANK='2',
        MASTER_ADDR='first',
        PORT='1234',
        PYTHON=str(tmp_path / 'fake_python'),
    )
    called = (tmp_path / 'called.txt').read_text().splitlines()
    assert called == [
        '-m',
        'torch.distributed.run',
        '--nnodes=3',
        '--node_rank=2',
        '--master_addr=first',
        '--master_port=1234',
        '--nproc_per_node=4',
        f'{REPO}/tools/train.py',
        'a config.py',
        '--launcher',
        'pytorch',
        '--amp',
    ]


UN = "\nmodel['backbone'].update(norm_cfg=dict(_delete_=True, type='UN', warmup_iters=4))\n"
SIX = "\nmodel['head'].update(num_classes=6)\ndata_preprocessor.update(num_classes=6)\n"


@pytest.mark.slow
def test_weights_start_a_new_training_and_wrong_shapes_are_named(tmp_path, data):
    config = write_classifier(tmp_path / 'un.py', data / 'classes', UN)
    one = ['--cfg-options', 'train_cfg.max_epochs=1', 'default_hooks.checkpoint.interval=1']
    main([str(config), '--work-dir', str(tmp_path / 'first'), *one])
    trained = tmp_path / 'first' / 'epoch_1.pth'
    before = torch.load(trained, weights_only=False)
    counts = [value for key, value in before['state_dict'].items() if key.endswith('norm1.count')]
    assert counts and all(count == 3 for count in counts), '10 pictures in batches of 4'

    other = tmp_path / 'other.pth'
    torch.save(dict(before, meta=dict(before['meta'], epoch=7, iter=21)), other)
    still = ['optim_wrapper.optimizer.lr=0', 'param_scheduler=[]']
    main([str(config), '--work-dir', str(tmp_path / 'second'), '--weights', str(other), *one, *still])
    after = torch.load(tmp_path / 'second' / 'epoch_1.pth', weights_only=False)
    assert (after['meta']['epoch'], after['meta']['iter']) == (1, 3)
    for key, value in after['state_dict'].items():
        if key.endswith('.count'):
            assert value == 3, 'counted from 0 again'
        elif key.endswith(('weight', 'bias')):
            assert torch.equal(value, before['state_dict'][key]), key

    bare = tmp_path / 'bare.safetensors'
    save_file(before['state_dict'], bare)
    main([str(config), '--work-dir', str(tmp_path / 'bare'), '--weights', str(bare), *one, *still])
    again = torch.load(tmp_path / 'bare' / 'epoch_1.pth', weights_only=False)['state_dict']
    assert all(torch.equal(value, after['state_dict'][key]) for key, value in again.items())

    six = write_classifier(tmp_path / 'six.py', data / 'classes', UN + SIX)
    wrong = r'epoch_1\.pth .*six\.py: .*head\.fc\.weight: .*load_from=FILE'
    with pytest.raises(SystemExit, match=wrong):
        main([str(six), '--work-dir', str(tmp_path / 'third'), '--weights', str(trained)])
    torch.save(dict(state_dict=dict(strange=torch.zeros(2))), other)
    with pytest.raises(SystemExit, match=r'pth.*strange'):
        main([str(config), '--work-dir', str(tmp_path / 'fourth'), '--weights', str(other)])


def test_weights_of_a_model_with_another_eps_are_refused(tmp_path, classifier):
    cfg = read_config(classifier)
    weights = build(cfg).state_dict()
    file, arguments = tmp_path / 'weights.pth', [str(classifier), '--work-dir', str(tmp_path / 'work'), '--weights']
    cfg.model.backbone.norm_cfg = dict(type='DTN', eps=1e-3)
    torch.save(dict(state_dict=weights, meta=dict(cfg=cfg.pretty_text)), file)
    with pytest.raises(SystemExit, match=r'norm1 has eps=0\.001, not 1e-05'):
        main([*arguments, str(file)])


def test_weights_stand_back_where_there_is_something_to_resume(tmp_path, classifier):
    weights = tmp_path / 'weights.pth'
    torch.save({}, weights)
    arguments = [str(classifier), '--work-dir', str(tmp_path / 'work'), '--weights', str(weights)]
    cfg = configure(parse_args([*arguments, '--resume']))
    assert (cfg.load_from, cfg.resume) == (str(weights), False)
    assert [h for h in cfg.custom_hooks if h['type'] == 'StartFromWeightsHook']
    with pytest.raises(FileNotFoundError):
        configure(parse_args([*arguments[:-1], str(tmp_path / 'lost.pth')]))
    cfg = configure(parse_args([*arguments, '--resume', str(weights)]))
    assert cfg.resume and not [h for h in cfg.custom_hooks if h['type'] == 'StartFromWeightsHook']
