"""tools/train.py refuses runs in which labels would have wrong names."""

from types import SimpleNamespace

import pytest
from mmengine.hub import get_config
from mmengine.registry import DATASETS, MODELS, init_default_scope

from mmdtn.datasets import write_classification, write_coco
from mmdtn.engine.hooks.check_classes import CheckClassesHook, classes_of, heads
from mmdtn.registry import class_of
from tests.training import log_of, write_classifier, write_detector
from tools.train import main


def refuse(tmp_path, config, message, *options):
    with pytest.raises(SystemExit, match=message):
        main([str(config), '--work-dir', str(tmp_path / 'work'), '--cfg-options', 'train_cfg.max_epochs=1', *options])


@pytest.mark.slow
@pytest.mark.parametrize('masks', [False, True])
def test_heads_of_detectors(tmp_path, masks):
    data = write_coco(tmp_path / 'coco', train=2, val=2, sides=(64, 80))
    config = write_detector(tmp_path / 'detector.py', data, masks=masks)
    for head in ('roi_head.bbox_head', 'roi_head.mask_head') if masks else ('bbox_head',):
        refuse(
            tmp_path, config, rf'{head} has num_classes=1, but the training data has 5', f'model.{head}.num_classes=1'
        )
    options = [f'model.{head}.num_classes=9', 'train_cfg.max_epochs=1', 'experiment_name=larger']
    main([str(config), '--work-dir', str(tmp_path / 'larger'), '--cfg-options', *options])
    assert f'{head} has num_classes=9, more than the 5 of the training data' in log_of(tmp_path / 'larger')


@pytest.mark.slow
def test_class_folders(tmp_path):
    data = write_classification(tmp_path / 'classes', train=5, val=5)
    config = write_classifier(tmp_path / 'classifier.py', data)
    refuse(tmp_path, config, r'head has num_classes=4, but the training data has 5 classes', 'model.head.num_classes=4')
    (data / 'val' / 'cross').rename(data / 'val' / 'zebra')
    refuse(tmp_path, config, r"label 1 is 'cross' in the training data, but 'ring' in the validation data")


@pytest.mark.parametrize(
    'config',
    [
        'dino/dino-4scale_r50_8xb2-12e_coco.py',
        'mask2former/mask2former_r50_8xb2-lsj-50e_coco-panoptic.py',
        'panoptic_fpn/panoptic-fpn_r50_fpn_1x_coco.py',
        'rpn/rpn_r50_fpn_1x_coco.py',
        'solo/solo_r50_fpn_1x_coco.py',
    ],
)
def test_mmdetections_own_configs_agree_with_their_data(config):
    """Panoptic data has classes without boxes, and an RPN has one class."""
    cfg = get_config(f'mmdet::{config}')
    init_default_scope('mmdet')
    model = MODELS.build(cfg.model)
    data = SimpleNamespace(dataset=SimpleNamespace(metainfo=class_of(cfg.train_dataloader.dataset, DATASETS).METAINFO))
    runner = SimpleNamespace(train_dataloader=data, val_dataloader=data, val_loop=True, model=model)
    CheckClassesHook().before_train(runner)
    assert {number for _, number in heads(model)} <= {80} and len(classes_of(data)) == 80
