from types import SimpleNamespace

import pytest
from mmengine.dataset import Compose
from mmengine.registry import DATASETS, DefaultScope
from mmengine.runner import Runner

from mmdtn.datasets import write_coco
from mmdtn.engine.faults import DataError
from mmdtn.engine.hooks import SkipBrokenImagesHook
from mmdtn.engine.hooks.skip_broken_images import WithoutBrokenImages


@pytest.fixture
def build(tmp_path):
    """Builds a dataset of four images with the given pipeline."""
    import mmdet.datasets  # noqa: F401

    coco = write_coco(tmp_path / 'coco', train=4, val=1, sides=(64, 80))
    DefaultScope.get_instance('pipeline', scope_name='mmdet')

    def dataset(*steps):
        return DATASETS.build(
            dict(
                type='CocoDataset',
                data_root=str(coco),
                ann_file='annotations/instances_train.json',
                data_prefix=dict(img='train/'),
                metainfo=dict(classes=('ring',)),
                pipeline=list(steps),
            )
        )

    return dataset


def test_a_wrong_pipeline_is_not_the_images_fault(tmp_path, build):
    """Only images that cannot be decoded are skipped. Other errors are raised."""
    dataset = build(dict(type='LoadImageFromFile'), dict(type='FilterAnnotations'))
    log = tmp_path / 'log'
    log.mkdir()
    dataset.pipeline = WithoutBrokenImages(dataset.pipeline, str(log), strict=False)
    with pytest.raises(AssertionError):
        dataset[0]
    assert not list(log.iterdir())


def test_a_pipeline_that_is_switched_is_checked_too_and_so_is_part_of_a_data_set(tmp_path, build):
    """mmdet's PipelineSwitchHook replaces the pipeline, and mmengine slices the dataset for num_batch_per_epoch."""
    loader = dict(
        dataset=build(dict(type='LoadImageFromFile')),
        batch_size=1,
        num_batch_per_epoch=2,
        sampler=dict(type='DefaultSampler'),
    )
    runner = SimpleNamespace(train_dataloader=Runner.build_dataloader(loader), log_dir=str(tmp_path))
    dataset = runner.train_dataloader.dataset._dataset
    hook = SkipBrokenImagesHook()
    for _ in range(2):
        hook.before_train_epoch(runner)
        hook.before_train_epoch(runner)
        assert isinstance(dataset.pipeline, WithoutBrokenImages)
        assert [type(step).__name__ for step in dataset.pipeline.transforms] == ['LoadImageFromFile']
        dataset.pipeline = Compose(dataset.pipeline.transforms)


def test_a_folder_without_any_of_the_pictures_ends_the_run(tmp_path, build):
    dataset = build(dict(type='LoadImageFromFile'))
    dataset.pipeline = WithoutBrokenImages(dataset.pipeline, str(tmp_path), strict=False)
    for path in (tmp_path / 'coco' / 'train').iterdir():
        path.unlink()
    with pytest.raises(DataError, match=r'100 .*train/00000\d\.jpg'):
        dataset[0]


def test_images_that_come_from_elsewhere_are_not_looked_for(tmp_path, build):
    dataset = build(dict(type='LoadImageFromFile', backend_args=dict(backend='petrel')))
    runner = SimpleNamespace(train_dataloader=SimpleNamespace(dataset=dataset), log_dir=str(tmp_path))
    SkipBrokenImagesHook().before_train_epoch(runner)
    assert not isinstance(dataset.pipeline, WithoutBrokenImages)
    checked = WithoutBrokenImages(Compose([lambda data: data['img_path']]), str(tmp_path), strict=True)
    assert checked(dict(img_path='s3://bucket/1.jpg')) == 's3://bucket/1.jpg'
