"""Through tools/train.py: what would be trained or measured under a wrong name."""

import pytest

from mmdtn.datasets import write_classification, write_coco
from tests.training import log_of, write_classifier, write_detector
from tools.train import main

pytestmark = pytest.mark.slow


def refuse(tmp_path, config, message, *options):
    with pytest.raises(SystemExit, match=message):
        main([str(config), '--work-dir', str(tmp_path / 'work'), '--cfg-options', 'train_cfg.max_epochs=1', *options])


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


def test_class_folders(tmp_path):
    data = write_classification(tmp_path / 'classes', train=5, val=5)
    config = write_classifier(tmp_path / 'classifier.py', data)
    refuse(tmp_path, config, r'head has num_classes=4, but the training data has 5 classes', 'model.head.num_classes=4')
    (data / 'val' / 'cross').rename(data / 'val' / 'zebra')
    refuse(tmp_path, config, r"label 1 is 'cross' in the training data, but 'ring' in that of validation")
