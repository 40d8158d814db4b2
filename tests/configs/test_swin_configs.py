"""Every config in configs/swin: it builds, trains a step, infers, and says what the papers' recipes say."""

from pathlib import Path

import pytest
from mmengine.registry import MODELS

from mmdtn.norms import DTN

from .helpers import (
    added_flops,
    classifier_trains_a_step_and_infers,
    load,
    weight_decay_of_each_parameter,
)

ROOT = Path(__file__).parents[2] / 'configs' / 'swin'
DETECTION = sorted(p.name for p in ROOT.glob('*_coco*.py'))
IMAGENET = sorted(p.name for p in ROOT.glob('*_in1k.py'))
RETINANET, MASK_RCNN = (f'{kind}_swin-t-dtn_fpn_1x_coco.py' for kind in ('retinanet', 'mask-rcnn'))


def test_the_configs_are_there():
    assert len(DETECTION) == 24 and len(IMAGENET) == 4


@pytest.mark.parametrize('name', [name for name in DETECTION if '_1x_' in name])
def test_detection_recipe(name):
    cfg = load(ROOT / name)
    retinanet = name.startswith('retinanet')
    assert list(cfg.model.neck.in_channels) == [96, 192, 384, 768][retinanet:]
    assert cfg.model.neck.num_outs == 5 and cfg.model.backbone.type == 'SwinDTN' and cfg.model.backbone.arch == 'tiny'
    if retinanet:
        assert (cfg.model.neck.start_level, cfg.model.neck.add_extra_convs) == (0, 'on_input')
    assert cfg.optim_wrapper.optimizer == dict(type='AdamW', lr=1e-4, weight_decay=0.05)
    warm_up, decay = cfg.param_scheduler
    assert (warm_up.type, warm_up.begin, warm_up.end, warm_up.by_epoch) == ('LinearLR', 0, 1000, False)
    assert cfg.train_cfg.max_epochs == 12 and decay.milestones == [8, 11]
    assert cfg.auto_scale_lr.base_batch_size == 16 and cfg.train_dataloader.batch_size == 2
    pipeline = cfg.train_dataloader.dataset.pipeline
    assert tuple(next(t for t in pipeline if t.type == 'Resize').scale) == (1333, 800)
    assert next(t for t in pipeline if t.type == 'LoadAnnotations').get('with_mask', False) == (not retinanet)


@pytest.mark.slow
@pytest.mark.parametrize('name', IMAGENET)
def test_classifier_trains_a_step_and_infers(name):
    classifier_trains_a_step_and_infers(ROOT / name)


@pytest.mark.parametrize('name', IMAGENET)
def test_arch(name):
    assert load(ROOT / name).model.backbone.arch == ('tiny' if 'swin-t' in name else 'small')


@pytest.mark.parametrize('name', ['mask-rcnn_swin-t-dtn_fpn_1x_coco.py', 'swin-t-dtn_8xb128_in1k.py'])
def test_no_weight_decay_on_dtn_norms_and_position_tables(name):
    cfg = load(ROOT / name)
    model = MODELS.build(cfg.model)
    decay = weight_decay_of_each_parameter(model, cfg.optim_wrapper)
    for parameter_name, p in model.backbone.named_parameters():
        spared = 'norm' in parameter_name or parameter_name.endswith('relative_position_bias_table')
        spared |= name.endswith('in1k.py') and p.dim() == 1
        assert (decay[id(p)] == 0) == spared, parameter_name
    dtn = [p for m in model.modules() if isinstance(m, DTN) for p in m.parameters()]
    assert dtn and all(decay[id(p)] == 0 for p in dtn)


@pytest.mark.slow
@pytest.mark.parametrize('name', ['swin-t', pytest.param('swin-s', marks=pytest.mark.exhaustive)])
def test_flops_that_dtn_adds(name):
    added = added_flops(ROOT / f'{name}-dtn_8xb128_in1k.py', ROOT / f'{name}_8xb128_in1k.py')
    assert 0 < added <= 0.02


def test_the_readme_lists_every_config():
    readme = (ROOT / 'README.md').read_text()
    assert all(f'({name})' in readme for name in (*DETECTION, *IMAGENET))
