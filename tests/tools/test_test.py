"""tools/test.py writes the results that it measured."""

import contextlib
import io
import json

import numpy as np
import pytest
import torch
from mmengine.config import Config
from mmengine.fileio import load
from mmengine.registry import METRICS, MODELS, TRANSFORMS, init_default_scope
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from mmdtn.datasets import write_classification, write_coco
from mmdtn.registry import class_of
from tests.training import metrics, write_classifier, write_detector
from tools.test import augment, dump_predictions, main
from tools.train import main as train

ORACLE = """
custom_imports = dict(imports=['mmdtn', 'tests.tools.oracle'])
model = dict(_delete_=True, type='Oracle', masks={masks}, data_preprocessor=dict(type='DetDataPreprocessor'))
"""
STATS = ('mAP', 'mAP_50', 'mAP_75', 'mAP_s', 'mAP_m', 'mAP_l')


@pytest.fixture(scope='module')
def coco(tmp_path_factory):
    return write_coco(tmp_path_factory.mktemp('data') / 'coco', train=2, val=12, sides=(128, 220))


def by_hand(annotations, predictions, kind):
    """Returns the dumped predictions in COCO's result format, and their metrics from pycocotools."""
    truth = COCO(annotations)
    categories = sorted(truth.getCatIds())
    results = []
    for sample in predictions:
        found = sample['pred_instances']
        for i, box in enumerate(found['bboxes'].tolist()):
            result = dict(image_id=sample['img_id'], category_id=categories[found['labels'][i]])
            result |= dict(score=float(found['scores'][i]))
            if kind == 'bbox':
                result['bbox'] = [box[0], box[1], box[2] - box[0], box[3] - box[1]]
            else:
                result['segmentation'] = dict(found['masks'][i], counts=found['masks'][i]['counts'].decode())
            results.append(result)
    evaluation = COCOeval(truth, truth.loadRes(json.loads(json.dumps(results))), kind)
    evaluation.evaluate()
    evaluation.accumulate()
    evaluation.summarize()
    return evaluation.stats


@pytest.mark.slow
@pytest.mark.parametrize('masks', [False, True])
def test_evaluation_equals_pycocotools_on_the_dumped_results(tmp_path, coco, masks):
    config = write_detector(tmp_path / 'config.py', coco, masks=masks)
    oracle = tmp_path / 'oracle.py'
    oracle.write_text(f"_base_ = '{config}'" + ORACLE.format(masks=masks))
    torch.save(dict(state_dict=dict(unused=torch.zeros(1))), tmp_path / 'none.pth')
    out, work = tmp_path / 'predictions.pkl', tmp_path / 'work'
    main([str(oracle), str(tmp_path / 'none.pth'), '--out', str(out), '--work-dir', str(work)])
    measured, predictions = metrics(work), load(out)
    assert len(predictions) == 12
    for kind in ['bbox', 'segm'] if masks else ['bbox']:
        with contextlib.redirect_stdout(io.StringIO()):
            stats = by_hand(str(coco / 'annotations' / 'instances_val.json'), predictions, kind)
        assert 0.1 < stats[0] < stats[1] < 0.99, 'neither everything right nor everything wrong'
        for name, value in zip(STATS, stats, strict=False):
            assert measured[f'coco/{kind}_{name}'] == float(f'{value:.3f}'), (kind, name)


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
    """Returns the config and checkpoint of a classifier."""
    root = tmp_path_factory.mktemp('classifier')
    write_classification(root / 'data', train=10, val=10)
    config = write_classifier(root / 'config.py', root / 'data')
    train([str(config), '--work-dir', str(root / 'work'), '--cfg-options', 'train_cfg.max_epochs=1'])
    return config, root / 'work' / 'epoch_1.pth'


def run(tmp_path, trained, *options):
    config, checkpoint = trained
    main([str(config), str(checkpoint), '--work-dir', str(tmp_path / 'work'), *options])
    return metrics(tmp_path / 'work')


@pytest.mark.slow
def test_accuracy_equals_that_of_the_dumped_predictions(tmp_path, trained):
    measured = run(tmp_path, trained, '--out', str(tmp_path / 'out.pkl'))
    predictions = load(tmp_path / 'out.pkl')
    right = [int(sample['pred_score'].argmax()) == int(sample['gt_label']) for sample in predictions]
    assert len(right) == 10 and measured['accuracy/top1'] == pytest.approx(100 * np.mean(right))


@pytest.mark.slow
def test_show_dir_has_a_picture_for_each_image(tmp_path, trained, coco, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run(tmp_path, trained, '--show-dir', 'drawn')
    assert len(list((tmp_path / 'drawn').rglob('*.*'))) == 10


@pytest.mark.slow
def test_tta_averages_the_image_and_its_mirror_image(tmp_path, trained):
    run(tmp_path / 'plain', trained, '--out', str(tmp_path / 'plain.pkl'))
    run(tmp_path / 'tta', trained, '--tta', '--out', str(tmp_path / 'tta.pkl'))
    mirrored = tmp_path / 'mirrored.py'
    flip = "_pipeline = [*_load, dict(type='RandomFlip', prob=1.0), dict(type='PackInputs')]\n"
    mirrored.write_text(trained[0].read_text() + flip + "test_dataloader['dataset']['pipeline'] = _pipeline\n")
    run(tmp_path / 'mirrored', (mirrored, trained[1]), '--out', str(tmp_path / 'mirrored.pkl'))
    plain, tta, mirror = (load(tmp_path / f'{name}.pkl') for name in ('plain', 'tta', 'mirrored'))
    for one, both, other in zip(plain, tta, mirror, strict=True):
        torch.testing.assert_close(both['pred_score'], (one['pred_score'] + other['pred_score']) / 2)


@pytest.mark.slow
def test_detector_with_tta(tmp_path, coco):
    """Only checks that the test runs, because predictions of an untrained detector mean nothing."""
    config = write_detector(tmp_path / 'config.py', coco)
    train([str(config), '--work-dir', str(tmp_path / 'trained'), '--cfg-options', 'train_cfg.max_epochs=1'])
    checkpoint = tmp_path / 'trained' / 'epoch_1.pth'
    main(
        [
            str(config),
            str(checkpoint),
            '--tta',
            '--work-dir',
            str(tmp_path / 'a'),
            '--out',
            str(tmp_path / 'a.pkl'),
            '--cfg-options',
            'model.test_cfg.score_thr=0.0',
        ]
    )
    assert len(load(tmp_path / 'a.pkl')) == 12


@pytest.mark.parametrize('kind', ['classifier', 'detector'])
@pytest.mark.parametrize('way', ['name', 'scope', 'class'])
def test_options_fit_the_model_however_it_is_named(tmp_path, coco, kind, way):
    """The class of the model decides, whatever the default scope is."""
    write = write_classifier if kind == 'classifier' else write_detector
    package = 'mmpretrain' if kind == 'classifier' else 'mmdet'
    config = write(tmp_path / 'config.py', coco)
    cfg = Config.fromfile(config)
    name = cfg.model.type
    if way == 'scope':
        cfg.default_scope, cfg.model.type = 'mmengine', f'{package}.{name}'
    init_default_scope(cfg.default_scope)
    if way == 'class':
        with MODELS.switch_scope_and_registry(None) as registry:
            cfg.model.type = registry.get(name)
    dump_predictions(cfg, 'out.pkl')
    augment(cfg)
    dump = cfg.test_evaluator[-1].type
    assert dump == ('DumpResults' if kind == 'classifier' else 'mmdet.DumpDetResults')
    assert cfg.model.type == ('mmpretrain.AverageClsScoreTTA' if kind == 'classifier' else 'DetTTAModel')
    flips, (pack,) = cfg.test_dataloader.dataset.pipeline[-1].transforms
    assert ('meta_keys' in pack) == (kind == 'detector')
    for settings, registry in ((dict(type=dump), METRICS), (cfg.model, MODELS), (flips[0], TRANSFORMS)):
        assert class_of(settings, registry).__module__.partition('.')[0] in (package, 'mmengine', 'mmcv')


def test_errors(tmp_path, trained):
    config, checkpoint = trained
    with pytest.raises(SystemExit, match=r'epoch_2\.pth does not exist; nearest: epoch_1\.pth'):
        main([str(config), str(checkpoint.with_name('epoch_2.pth'))])
    with pytest.raises(SystemExit):
        main([str(config), str(checkpoint), '--out', 'results.txt'])
    plain = ['--cfg-options', 'model.backbone.norm_cfg.type=LN']
    with pytest.raises(SystemExit, match=r'epoch_1\.pth is not .*config\.py: the model has no backbone\..*mean_mix'):
        main([str(config), str(checkpoint), '--work-dir', str(tmp_path), *plain])
    with pytest.raises(SystemExit, match=r'size mismatch for head\.fc\.weight'):
        main([str(config), str(checkpoint), '--work-dir', str(tmp_path), '--cfg-options', 'model.head.num_classes=4'])
    torch.save(dict(state_dict=dict(a=torch.ones(1))), tmp_path / 'other.pth')
    with pytest.raises(SystemExit, match=r'other\.pth is not .*: the file has no backbone.*; and \d+ more'):
        main([str(config), str(tmp_path / 'other.pth'), '--work-dir', str(tmp_path)])
