"""Runs the command lines from a config to a curve: training, resuming, testing, thresholds, early exit and figures."""

import json

import pytest
import torch
from PIL import Image

from mmdtn import checkpoints
from mmdtn.analysis import exit_flops
from mmdtn.datasets import write_classification
from mmdtn.dvt import DVT, budget
from mmdtn.dvt.answers import answers, build_loader, load_cascade
from mmdtn.models import read_config
from tools import dvt_budget
from tools.analysis_tools import browse_exits, get_flops
from tools.model_converters import convert
from tools.test import main as evaluate
from tools.train import main as train

from ..training import REPO

pytestmark = pytest.mark.slow
CONFIG = """
_base_ = '{repo}/configs/dvt/dvt-mini_4e_cifar10-folder.py'
model = dict(arch=dict(width=48, depth=2), num_classes=5, grids=(3, 4, 7), img_size=28, drop_path_rate=0.1)
data_preprocessor = dict(num_classes=5)
_load = [dict(type='LoadImageFromFile'), dict(type='Resize', scale=(28, 28))]
_train = dict(data_root='{data}', pipeline=[*_load, dict(type='RandomFlip', prob=0.5), dict(type='PackInputs')])
_val = dict(data_root='{data}', data_prefix='val', pipeline=[*_load, dict(type='PackInputs')])
_one = dict(num_workers=0, persistent_workers=False)
train_dataloader = dict(batch_size=10, dataset=_train, **_one)
val_dataloader = dict(batch_size=7, dataset=_val, **_one)
test_dataloader = val_dataloader
calibration_dataloader = dict(batch_size=10, dataset=_train, **_one)
param_scheduler = [dict(type='LinearLR', start_factor=0.1, by_epoch=False, end=5), dict(type='ConstantLR', factor=1.0)]
optim_wrapper = dict(optimizer=dict(lr=3e-3))
train_cfg = dict(max_epochs=2)
custom_hooks = [dict(type='EMAHook', momentum=0.5)]
"""


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
    """Returns a folder with a config and two trainings: one without a stop, and one in two parts."""
    folder = tmp_path_factory.mktemp('cascade')
    data = write_classification(folder / 'data', train=40, val=30)
    (folder / 'config.py').write_text(CONFIG.format(repo=REPO, data=data))
    config = str(folder / 'config.py')
    train([config, '--work-dir', str(folder / 'one')])
    train([config, '--work-dir', str(folder / 'two'), '--cfg-options', 'train_cfg.max_epochs=1'])
    train([config, '--work-dir', str(folder / 'two'), '--resume'])
    return folder


@pytest.fixture(scope='module')
def curve(trained):
    """Returns the output of mode 2."""
    options = ['--images', '30', '--leave-early', '--publish', str(trained / 'published.pth')]
    arguments = [str(trained / 'config.py'), str(trained / 'one' / 'epoch_2.pth'), '--out', str(trained / 'budget')]
    dvt_budget.main([*arguments, *options])
    return json.loads((trained / 'budget' / 'budget.json').read_text())


def metrics(work_dir):
    (path,) = (p for p in work_dir.glob('*/*.json') if p.stem == p.parent.name)
    return json.loads(path.read_text())


def measured(trained):
    cfg = read_config(trained / 'config.py')
    model = load_cascade(cfg, str(trained / 'one' / 'epoch_2.pth'))
    return model, answers(model, build_loader(cfg, 'val_dataloader'))


def test_a_resumed_training_is_the_uninterrupted_one(trained):
    one, two = (checkpoints.read(trained / name / 'epoch_2.pth') for name in ('one', 'two'))
    assert all(torch.equal(one[key], two[key]) for key in one)
    log = next((trained / 'one').glob('*/*.log')).read_text()
    assert all(f'{name}: ' in log for name in ('exit1/top1', 'exit3/top1', 'accuracy/top5', 'exit2_loss'))


def test_testing_gives_every_exits_accuracy(tmp_path, trained):
    evaluate([str(trained / 'config.py'), str(trained / 'one' / 'epoch_2.pth'), '--work-dir', str(tmp_path)])
    _, found = measured(trained)
    want = (100 * found.hit.double().mean(1)).tolist()
    got = metrics(tmp_path)
    assert [got[f'exit{k}/top1'] for k in (1, 2, 3)] == pytest.approx(want, abs=1e-3)
    assert got['accuracy/top1'] == got['exit3/top1']


def test_the_curve_is_of_the_thresholds_in_it(trained, curve, capsys):
    model, found = measured(trained)
    want = [flops / 1e9 for flops in exit_flops(model, torch.zeros(1, 3, 28, 28))]
    assert curve['gflops'] == pytest.approx(want)
    assert curve['anytime'] == pytest.approx((100 * found.hit.double().mean(1)).tolist())
    for way in ('sweep', 'exact'):
        assert len(curve[way]) == 59
        rows = torch.tensor([point['thresholds'] for point in curve[way]])
        outcome = budget.outcome(*found, rows, torch.tensor(curve['gflops']))
        assert [point['accuracy'] for point in curve[way]] == pytest.approx(outcome.accuracy.tolist())
        assert [point['gflops'] for point in curve[way]] == pytest.approx(outcome.gflops.tolist(), rel=1e-5)
        assert [point['shares'] for point in curve[way]] == [pytest.approx((n / 30).tolist()) for n in outcome.left]
        chance = [(n[:, None] / 30 * found.hit).sum(0).mean().item() for n in outcome.left]  # over images, not exits
        assert [point['by_chance'] for point in curve[way]] == pytest.approx([100 * part for part in chance])
    assert len({tuple(point['thresholds']) for point in curve['sweep']}) > 20
    for name in ('curve.png', 'shares.png'):
        assert min(Image.open(trained / 'budget' / name).size) > 300


def test_leaving_early_answers_as_choosing_afterwards(trained, curve):
    assert len(curve['leave_early']) == 3
    for run in curve['leave_early']:
        (point,) = {p['accuracy'] for p in curve['sweep'] if p['thresholds'] == run['thresholds']}
        assert run['differing'] == 0 and run['accuracy'] == pytest.approx(point)
        assert run['all_exits'] > 0 and run['leaving_early'] > 0


def test_stored_results_are_read_and_measured_again(trained, curve, capsys):
    config, published = str(trained / 'config.py'), str(trained / 'published.pth')
    dvt_budget.main([config, published, '--mode', '1', '--out', str(trained / 'again')])
    again = json.loads((trained / 'again' / 'budget.json').read_text())
    assert all(again[key] == curve[key] for key in ('gflops', 'anytime', 'sweep'))
    capsys.readouterr()
    dvt_budget.main([config, published, '--mode', '0'])
    said = capsys.readouterr().out
    assert f'{curve["anytime"][2]:.2f} at {curve["gflops"][2]:.4g} GFLOPs' in said
    assert f'{curve["sweep"][-1]["gflops"]:<7.4g} {curve["sweep"][-1]["accuracy"]:6.2f}' in said
    with pytest.raises(SystemExit, match='no stored results'):
        dvt_budget.main([config, str(trained / 'one' / 'epoch_2.pth'), '--mode', '0'])


def test_a_published_file_starts_a_cascade_for_other_classes(trained, curve):
    cfg = read_config(trained / 'config.py')
    init = dict(type='Pretrained', checkpoint=str(trained / 'published.pth'), heads=False)
    model = DVT(
        **{k: v for k, v in cfg.model.items() if k not in ('type', 'num_classes')}, num_classes=3, init_cfg=init
    )
    model.init_weights()
    theirs = checkpoints.read(trained / 'published.pth')
    assert torch.equal(model.exits[2].blocks[1].mlp.fc1.weight, theirs['normal_token.blocks.1.mlp.fc1.weight'])
    for exit in model.exits:
        assert 0.015 < exit.head.weight.std() < 0.025 and not exit.head.bias.any(), 'a start of its own'


def test_a_published_file_is_converted_for_testing(tmp_path, trained, curve, monkeypatch):
    config, ours = str(trained / 'config.py'), str(tmp_path / 'ours.pth')
    arguments = ['convert.py', str(trained / 'published.pth'), '--out', ours, '--to']
    monkeypatch.setattr('sys.argv', [*arguments, config])
    convert.main()
    evaluate([config, ours, '--work-dir', str(tmp_path / 'work')])
    assert metrics(tmp_path / 'work')['accuracy/top1'] == pytest.approx(curve['anytime'][2], abs=1e-3)
    monkeypatch.setattr('sys.argv', [*arguments, 'deit-s'])
    with pytest.raises(SystemExit, match='A dvt file needs --to CONFIG'):
        convert.main()


def test_thresholds_of_a_budget_in_a_config(tmp_path, trained, curve):
    point = curve['sweep'][30]
    limit = point['gflops'] * (1 + 1e-9)
    base, file = trained / 'config.py', trained / 'budget' / 'budget.json'
    early = tmp_path / 'early.py'
    early.write_text(
        f"_base_ = '{base}'\nmodel = dict(thresholds=dict(file='{file}', gflops={limit}))\n"
        f"test_evaluator = dict(type='ExitAccuracy', gflops={curve['gflops']})\n"
    )
    evaluate([str(early), str(trained / 'one' / 'epoch_2.pth'), '--work-dir', str(tmp_path / 'work')])
    got = metrics(tmp_path / 'work')
    (accuracy,) = {p['accuracy'] for p in curve['sweep'] if p['gflops'] == point['gflops']}
    assert got['accuracy/top1'] == pytest.approx(accuracy, abs=1e-3)
    assert got['gflops'] == pytest.approx(point['gflops'], rel=1e-3)
    assert [got[f'exit{k}/share'] for k in (1, 2, 3)] == pytest.approx([100 * s for s in point['shares']], abs=1e-2)


def test_pictures_of_each_exit(tmp_path, trained, capsys):
    config, checkpoint = str(trained / 'config.py'), str(trained / 'one' / 'epoch_2.pth')
    browse_exits.main([config, checkpoint, '--out', str(tmp_path / 'exits.png')])
    assert min(Image.open(tmp_path / 'exits.png').size) > 300
    _, found = measured(trained)
    lines = capsys.readouterr().out.splitlines()
    before = torch.zeros(30, dtype=torch.bool)
    for k, hit in enumerate(found.hit):
        assert f'exit {k + 1} is the first that is right for {(hit & ~before).sum()} of 30 images' in lines
        before |= hit
    labels = [i % 5 for i in range(30)]
    chosen = browse_exits.first_right(found, labels, 0)
    assert sorted(chosen) == found.hit[0].nonzero()[:, 0].tolist()
    first = chosen[: len({labels[i] for i in chosen})]
    assert len({labels[i] for i in first}) == len(first), 'one of each class before the second of any'
    options = ['--out', str(tmp_path / 'few.png'), '--cfg-options', 'val_dataloader.dataset.indices=10']
    browse_exits.main([config, checkpoint, *options])
    assert f'exit 1 is the first that is right for {found.hit[0][:10].sum()} of 10 images' in capsys.readouterr().out


def test_flops_are_printed_for_each_exit(trained, curve, capsys, monkeypatch):
    monkeypatch.setattr('sys.argv', ['get_flops.py', str(trained / 'config.py'), '--shape', '28', '28'])
    get_flops.main()
    said = capsys.readouterr().out
    assert all(f'up to exit {k}: {g:.3f} GFLOPs' in said for k, g in enumerate(curve['gflops'], 1))


def test_models_without_exits_are_refused(trained):
    config = str(REPO / 'configs' / 'vit' / 'vit-mini_4e_cifar10-folder.py')
    with pytest.raises(SystemExit, match='ImageClassifier, which has no exits'):
        dvt_budget.main([config, str(trained / 'one' / 'epoch_2.pth')])
