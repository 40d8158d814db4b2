"""test_robustness.py and corrupt.py in tools: cells are measured once, with the same results as tools/test.py."""

import csv
import json
import shutil
from typing import ClassVar

import numpy as np
import pytest
import torch
from mmengine.model import BaseModel
from mmengine.registry import MODELS
from PIL import Image

from mmdtn.datasets import write_classification, write_coco
from mmdtn.datasets.corruption import GROUPS, SEVERITIES
from tests.training import in_two_processes, write_classifier, write_detector
from tools.analysis_tools import test_robustness
from tools.dataset_converters import corrupt
from tools.test import main as evaluate
from tools.train import main as train

from .oracle import Oracle
from .test_test import metrics

pytestmark = pytest.mark.slow
VERY_ROUGH = 30  # contrast of neighbouring pixels as for impulse noise in severity 5
CELLS = ('--corruptions', 'impulse_noise', 'fog', '--severities', '1', '5')


def read_csv(path):
    with path.open() as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope='module')
def classifier(tmp_path_factory):
    """Returns a config and a checkpoint.

    The 10 test images are 32 x 32 PNG files, which the pipeline does not resize.
    """
    root = tmp_path_factory.mktemp('classifier')
    data = write_classification(root / 'data', train=10, val=10, sides=(32, 32))
    for path in data.rglob('*.jpg'):
        Image.open(path).save(path.with_suffix('.png'))
        path.unlink()
    config = write_classifier(root / 'config.py', data)
    train([str(config), '--work-dir', str(root / 'work'), '--cfg-options', 'train_cfg.max_epochs=1'])
    return config, root / 'work' / 'epoch_1.pth', data


def run(classifier, out, *options):
    test_robustness.main([str(classifier[0]), str(classifier[1]), '--out', str(out), *options])
    return json.loads((out / 'summary.json').read_text())['config']


def test_a_classifiers_cells(classifier, tmp_path, capsys):
    summary = run(classifier, tmp_path / 'out', *CELLS)
    evaluate([str(classifier[0]), str(classifier[1]), '--work-dir', str(tmp_path / 'clean')])
    assert summary['clean_error'] == pytest.approx(100 - metrics(tmp_path / 'clean')['accuracy/top1'])
    rows = read_csv(tmp_path / 'out' / 'robustness.csv')
    assert [row['corruption'] for row in rows] == ['impulse_noise', 'fog'] and rows[0]['CE'] == ''
    by_hand = np.mean([float(row[f'severity {s}']) for row in rows for s in (1, 5)])
    assert summary['mean_error'] == pytest.approx(by_hand) and 'mCE' not in summary
    assert Image.open(tmp_path / 'out' / 'robustness.png').width == 1200
    assert Image.open(tmp_path / 'out' / 'examples.png').width == 1200
    # After an interrupted run, only missing cells are measured, with the same results.
    file = tmp_path / 'out' / 'cells.json'
    before = json.loads(file.read_text())
    changed = json.loads(file.read_text())
    del changed['config']['cells']['fog/5']
    file.write_text(json.dumps(changed))
    capsys.readouterr()
    run(classifier, tmp_path / 'out', *CELLS)
    said = capsys.readouterr().out
    assert 'fog/5 (1 of 1)' in said and 'fog/1' not in said and json.loads(file.read_text()) == before


def test_cells_are_the_same_with_workers(classifier, tmp_path):
    loader = 'test_dataloader.{}={}'
    workers = [loader.format('num_workers', 2), loader.format('persistent_workers', True)]
    found = [
        run(classifier, tmp_path / str(i), *CELLS, *options)
        for i, options in enumerate(([], ['--cfg-options', *workers]))
    ]
    cells = [json.loads((tmp_path / str(i) / 'cells.json').read_text())['config']['cells'] for i in range(2)]
    assert found[0] == found[1] and cells[0] == cells[1]


def test_all_severities_give_mce_and_ce(classifier, tmp_path):
    """The test sets the accuracies in cells.json, because the real errors of the model do not matter here."""
    run(classifier, tmp_path / 'out', '--corruptions', 'fog', '--severities', '1')
    file = tmp_path / 'out' / 'cells.json'
    content = json.loads(file.read_text())
    names = [name for group, members in GROUPS.items() if group != 'extra' for name in members]
    content['config']['cells'] |= {f'{name}/{s}': {'accuracy/top1': 50.0} for name in names for s in SEVERITIES}
    file.write_text(json.dumps(content))
    summary = run(classifier, tmp_path / 'out')
    rows = read_csv(tmp_path / 'out' / 'robustness.csv')
    assert len(rows) == 15 and summary['mean_error'] == pytest.approx(50)
    assert float(rows[0]['CE']) == pytest.approx(50 / 0.886428, rel=1e-5)
    assert summary['mCE'] == pytest.approx(np.mean([float(row['CE']) for row in rows]), rel=1e-5)


@pytest.mark.parametrize('grouped', [False, True])
def test_stored_pictures_are_those_made_while_loading(classifier, tmp_path, grouped):
    stored = tmp_path / 'imagenet-c'
    corrupt.main([str(classifier[2] / 'val'), str(stored), *CELLS, '--yes', '--processes', '1'])
    assert len(list(stored.glob('*/*/*/*.png'))) == 2 * 2 * 10
    if grouped:
        for group, names in GROUPS.items():
            for name in names:
                if (stored / name).exists():
                    (stored / group).mkdir(exist_ok=True)
                    (stored / name).rename(stored / group / name)
    run(classifier, tmp_path / 'made', *CELLS)
    run(classifier, tmp_path / 'stored', *CELLS, '--stored', str(stored))
    made, read = (
        json.loads((tmp_path / name / 'cells.json').read_text())['config']['cells'] for name in ('made', 'stored')
    )
    assert made == read
    with pytest.raises(SystemExit, match=r'neither snow/ nor weather/snow/'):
        run(classifier, tmp_path / 'stored', '--corruptions', 'snow', '--stored', str(stored))
    with pytest.raises(SystemExit, match=r'imagenet-c.*--out'):
        run(classifier, tmp_path / 'made', '--stored', str(stored))


def test_stored_pictures_of_another_size_go_through_the_pipeline(classifier, tmp_path):
    config = tmp_path / 'config.py'
    smaller = "_base_.test_dataloader.dataset.pipeline[0], dict(type='mmpretrain.Resize', scale=(16, 16)), _last"
    config.write_text(
        f"_base_ = '{classifier[0]}'\n_last = _base_.test_dataloader.dataset.pipeline[-1]\n"
        f'test_dataloader = dict(dataset=dict(pipeline=[{smaller}]))\n'
        "model = dict(_delete_=True, type='Bright', data_preprocessor=dict(type='mmpretrain.ClsDataPreprocessor'))\n"
    )
    folder = tmp_path / 'stored' / 'fog' / '1'
    shutil.copytree(classifier[2] / 'val', folder)
    checkpoint = tmp_path / 'none.pth'
    torch.save(dict(state_dict=dict(unused=torch.zeros(1))), checkpoint)
    options = ['--corruptions', 'fog', '--severities', '1', '--stored', str(tmp_path / 'stored')]
    run((config, checkpoint), tmp_path / 'out', *options)
    clean, fog = json.loads((tmp_path / 'out' / 'cells.json').read_text())['config']['cells'].values()
    assert clean == fog and Bright.sides == {16}
    shutil.rmtree(folder / 'cross')
    with pytest.raises(SystemExit, match=r'fog/1 .*4 .*5 classes'):
        run((config, checkpoint), tmp_path / 'other', *options)


def test_some_of_the_stored_pictures(classifier, tmp_path):
    stored = tmp_path / 'stored' / 'fog' / '1'
    shutil.copytree(classifier[2] / 'val', stored)
    options = ['--corruptions', 'fog', '--severities', '1', '--stored', str(tmp_path / 'stored')]
    run(classifier, tmp_path / 'out', *options, '--pictures', '3')
    clean, fog = json.loads((tmp_path / 'out' / 'cells.json').read_text())['config']['cells'].values()
    assert clean == fog, 'the same three pictures'
    assert any(abs(clean['accuracy/top1'] - share) < 1e-3 for share in (0, 100 / 3, 200 / 3, 100))


def test_cells_of_other_settings_are_not_taken(classifier, tmp_path):
    cell = ('--corruptions', 'fog', '--severities', '1')
    run(classifier, tmp_path / 'out', *cell)
    with pytest.raises(SystemExit, match=r'cells\.json .*--out'):
        run(classifier, tmp_path / 'out', *cell, '--cfg-options', 'test_dataloader.dataset.data_prefix=train')


def test_writing_asks_first_and_goes_on_where_it_stopped(classifier, tmp_path, monkeypatch, capsys):
    source, target = classifier[2] / 'val', tmp_path / 'c'
    cell = ('--corruptions', 'contrast', '--severities', '3', '--processes', '1')
    monkeypatch.setattr('builtins.input', lambda question: 'n')
    with pytest.raises(SystemExit, match='nothing was written'):
        corrupt.main([str(source), str(target), *cell])
    assert 'about' in capsys.readouterr().out and not list(target.rglob('*.png'))
    with pytest.raises(SystemExit, match='would corrupt'):
        corrupt.main([str(source), str(source / 'c'), *cell, '--yes'])
    corrupt.main([str(source), str(target), *cell, '--yes'])
    first = {p: p.read_bytes() for p in target.rglob('*.png')}
    gone = sorted(first)[4]
    gone.unlink()
    capsys.readouterr()
    corrupt.main([str(source), str(target), *cell, '--yes'])
    assert 'written: 1 files' in capsys.readouterr().out
    assert {p: p.read_bytes() for p in target.rglob('*.png')} == first


def test_renditions_are_a_part_of_the_classes(classifier, tmp_path):
    """With three of the five classes, the best of three is right more often than the best of five."""
    renditions = tmp_path / 'renditions'
    for name in ('cross', 'ring', 'triangle'):
        shutil.copytree(classifier[2] / 'val' / name, renditions / name)
    summary = run(
        classifier, tmp_path / 'out', '--corruptions', 'fog', '--severities', '1', '--renditions', str(renditions)
    )
    assert summary['renditions_top1_of_3'] >= summary['renditions_top1_of_all']
    # The same holds for another folder with the same --out.
    shutil.copytree(renditions, tmp_path / 'fewer')
    shutil.rmtree(tmp_path / 'fewer' / 'ring')
    other = ('--corruptions', 'fog', '--severities', '1', '--renditions', str(tmp_path / 'fewer'))
    assert 'renditions_top1_of_2' in run(classifier, tmp_path / 'out', *other)
    (tmp_path / 'fewer' / 'cross').rename(tmp_path / 'fewer' / 'circle')
    with pytest.raises(SystemExit, match='circle '):
        run(classifier, tmp_path / 'none', *other)
    # These are the images of the test set from these classes.
    for measure in ('top1_of_3', 'top1_of_all'):
        assert summary[f'renditions_{measure}'] == summary[f'clean_{measure}']


@MODELS.register_module()
class Bright(BaseModel):
    """Classifier that predicts the class from the brightness, and records the sizes of the images."""

    sides: ClassVar[set] = set()

    def forward(self, inputs, data_samples=None, mode='predict'):
        self.sides.update(inputs.shape[-2:])
        guess = (inputs.mean((1, 2, 3)) * 1e4).long() % 5
        return [sample.set_pred_label(int(g)) for sample, g in zip(data_samples, guess, strict=True)]


@MODELS.register_module()
class NearSighted(Oracle):
    """Detector whose boxes get worse with the roughness of the image, and which finds nothing in very rough images."""

    def forward(self, inputs, data_samples=None, mode='predict'):
        found = super().forward(inputs, data_samples, mode)
        for image, sample in zip(inputs, found, strict=True):
            rough = (image[:, 1:] - image[:, :-1]).abs().float().mean()
            random = torch.Generator().manual_seed(int(sample.img_id))
            boxes = sample.pred_instances.bboxes
            sample.pred_instances.bboxes = boxes + torch.randn(boxes.shape, generator=random) * rough * 0.3
            if rough > VERY_ROUGH:
                sample.pred_instances = sample.pred_instances[:0]
        return found


@pytest.fixture(scope='module')
def detector(tmp_path_factory):
    root = tmp_path_factory.mktemp('detector')
    data = write_coco(root / 'coco', train=2, val=6)
    small = write_detector(root / 'small.py', data)
    config = root / 'config.py'
    model = "dict(_delete_=True, type='NearSighted', data_preprocessor=dict(type='DetDataPreprocessor'))"
    config.write_text(f"_base_ = '{small}'\nmodel = {model}\n")
    checkpoint = root / 'none.pth'
    torch.save(dict(state_dict=dict(unused=torch.zeros(1))), checkpoint)
    return config, checkpoint, data


def test_a_detectors_precision(detector, tmp_path):
    summary = run(detector, tmp_path / 'out', *CELLS)
    evaluate([str(detector[0]), str(detector[1]), '--work-dir', str(tmp_path / 'clean')])
    assert summary['bbox_mAP_P'] == metrics(tmp_path / 'clean')['coco/bbox_mAP'] > 0.2
    rows = read_csv(tmp_path / 'out' / 'robustness.csv')
    by_hand = np.mean([float(row[f'severity {s}']) for row in rows for s in (1, 5)])
    assert summary['bbox_mAP_mPC'] == pytest.approx(by_hand)
    assert summary['bbox_mAP_rPC'] == pytest.approx(100 * by_hand / summary['bbox_mAP_P'])
    assert 0 < by_hand < summary['bbox_mAP_P']
    assert float(rows[0]['severity 5']) == 0 < float(rows[0]['severity 1']), 'impulse noise hides all'


def test_some_pictures_and_a_second_model(detector, classifier, tmp_path):
    """The AP on some images equals that of an annotation file with only these images."""
    few = tmp_path / 'few.json'
    content = json.loads((detector[2] / 'annotations' / 'instances_val.json').read_text())
    content['images'] = [image for image in content['images'] if image['id'] in (1, 6)]
    content['annotations'] = [a for a in content['annotations'] if a['image_id'] in (1, 6)]
    few.write_text(json.dumps(content))
    other = tmp_path / 'other.py'
    other.write_text(
        f"_base_ = '{detector[0]}'\ntest_evaluator = dict(ann_file='{few}')\n"
        f"test_dataloader = dict(dataset=dict(ann_file='{few}'))\n"
    )
    arguments = [str(detector[0]), str(detector[1]), '--out', str(tmp_path / 'out'), '--pictures', '2']
    test_robustness.main([*arguments, '--against', str(other), str(detector[1]), *CELLS[:2], '--severities', '2'])
    summary = json.loads((tmp_path / 'out' / 'summary.json').read_text())
    assert summary['config'] == summary['other']
    with pytest.raises(SystemExit, match='names the same config and checkpoint again'):
        test_robustness.main([*arguments, '--against', str(detector[0]), str(detector[1])])
    shutil.copytree(detector[1].parent, tmp_path / 'copy' / 'LN', ignore=lambda *_: ['coco'])
    again = [str(detector[0]), str(tmp_path / 'copy' / 'LN' / 'none.pth'), *CELLS[:2], '--severities', '2']
    test_robustness.main([*arguments[:-4], '--out', str(tmp_path / 'two'), '--pictures', '2', '--against', *again])
    names = json.loads((tmp_path / 'two' / 'summary.json').read_text())
    assert list(names) == [f'config, {detector[1].parent.name}/none', 'config, LN/none']
    summary = run(classifier, tmp_path / 'few', '--corruptions', 'fog', '--severities', '1', '--pictures', '5')
    assert summary['clean_error'] in (0, 20, 40, 60, 80, 100)


def test_two_processes_find_what_one_finds(detector, tmp_path):
    """Only one process writes, and both exit."""
    alone = ['--cfg-options', 'test_dataloader.batch_size=1']  # the padding of an image depends on its batch
    arguments = [detector[0], detector[1], '--pictures', '3', *CELLS[:2], '--severities', '2', *alone]
    test_robustness.main([*map(str, arguments), '--out', str(tmp_path / 'one')])
    assert in_two_processes(test_robustness.main, *arguments, '--out', 'two', cwd=tmp_path) == [0, 0]
    one, two = ((tmp_path / name / 'robustness.csv').read_text() for name in ('one', 'two'))
    assert one == two and len(one.splitlines()) == 2
    assert 'written: ' in (tmp_path / 'said_0.txt').read_text()
    assert 'written: ' not in (tmp_path / 'said_1.txt').read_text()


def test_errors(classifier, tmp_path):
    with pytest.raises(SystemExit, match=r'no corruption .*nearest: snow'):
        run(classifier, tmp_path / 'out', '--corruptions', 'snowy')
    (tmp_path / 'empty').mkdir()
    with pytest.raises(SystemExit, match='empty has no images'):
        corrupt.main([str(tmp_path / 'empty'), str(tmp_path / 'c'), '--yes'])
