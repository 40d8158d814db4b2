import pytest
from mmengine.registry import DATASETS, DefaultScope

from mmdtn.datasets import write_coco
from mmdtn.engine.skip_broken_images_hook import WithoutBrokenImages


def test_a_wrong_pipeline_is_not_the_images_fault(tmp_path):
    """Only what does not decode is skipped; any other error stays an error."""
    import mmdet.datasets  # noqa: F401

    coco = write_coco(tmp_path / 'coco', train=4, val=1, sides=(64, 80))
    DefaultScope.get_instance('pipeline', scope_name='mmdet')
    dataset = DATASETS.build(
        dict(
            type='CocoDataset',
            data_root=str(coco),
            ann_file='annotations/instances_train.json',
            data_prefix=dict(img='train/'),
            metainfo=dict(classes=('ring',)),
            pipeline=[dict(type='LoadImageFromFile'), dict(type='FilterAnnotations')],
        )
    )
    log = tmp_path / 'log'
    log.mkdir()
    dataset.pipeline = WithoutBrokenImages(dataset.pipeline, str(log), strict=False)
    with pytest.raises(AssertionError):
        dataset[0]
    assert not list(log.iterdir())
