"""Every config in configs/pvt: it builds, trains a step, infers, and says what the papers' recipes say."""

from pathlib import Path

import pytest
from mmengine.registry import MODELS

from mmdtn.norms import DTN

from .helpers import (
    added_flops,
    classifier_trains_a_step_and_infers,
    costly,
    load,
    parts_of_the_classifier_fit,
    weight_decay_of_each_parameter,
)

ROOT = Path(__file__).parents[2] / 'configs' / 'pvt'
DETECTION = sorted(p.name for p in ROOT.glob('*_coco.py'))
IMAGENET = sorted(p.name for p in ROOT.glob('*_in1k.py'))
SINGLE_SCALE = [name for name in DETECTION if '_ms-' not in name]
RETINANET, MASK_RCNN = (f'{kind}_pvt-t-dtn_fpn_1x_coco.py' for kind in ('retinanet', 'mask-rcnn'))
CLASSIFIERS = ('pvt-t-dtn_8xb128_in1k.py', 'pvt-t_8xb128_in1k.py', 'pvtv2-b3-dtn_8xb128_in1k.py')


@pytest.mark.slow
@pytest.mark.parametrize('name', [name for name in DETECTION if '_ms-' in name])
def test_multi_scale_training_is_of_the_same_detector(name):
    assert load(ROOT / name).model == load(ROOT / name.replace('_ms-', '_')).model


@pytest.mark.parametrize('name', [name for name in DETECTION if name.startswith(('retinanet', 'mask-rcnn'))])
def test_detection_recipe(name):
    cfg = load(ROOT / name)
    b0 = 'v2-b0' in name
    assert list(cfg.model.neck.in_channels) == ([32, 64, 160, 256] if b0 else [64, 128, 320, 512])
    head = cfg.model.bbox_head if name.startswith('retinanet') else cfg.model.roi_head.bbox_head
    assert head.num_classes == 80
    if name.startswith('retinanet'):
        assert (cfg.model.neck.start_level, cfg.model.neck.add_extra_convs) == (1, 'on_input')
    assert cfg.optim_wrapper.optimizer == dict(
        type='AdamW', lr=1e-4 if name.startswith('retinanet') else 2e-4, weight_decay=1e-4
    )
    assert cfg.train_cfg.max_epochs == 12 and cfg.param_scheduler[1].milestones == [8, 11]
    assert cfg.auto_scale_lr.base_batch_size == 16 and cfg.train_dataloader.batch_size == 2
    pipeline = cfg.train_dataloader.dataset.pipeline
    resize = next(t for t in pipeline if 'Resize' in t.type)
    if '_ms-' in name:
        assert [s[1] for s in resize.scales] == list(range(480, 801, 32)) and {s[0] for s in resize.scales} == {1333}
    else:
        assert tuple(resize.scale) == (1333, 800)
    loads = next(t for t in pipeline if t.type == 'LoadAnnotations')
    assert loads.get('with_mask', False) == name.startswith('mask-rcnn')


@pytest.mark.slow
@pytest.mark.parametrize('name', costly(IMAGENET, cheap=CLASSIFIERS))
def test_classifier_trains_a_step_and_infers(name):
    classifier_trains_a_step_and_infers(ROOT / name)


@pytest.mark.parametrize('name', IMAGENET)
def test_parts_of_a_classifier_fit(name):
    parts_of_the_classifier_fit(ROOT / name)


@pytest.mark.parametrize(
    'name', ['retinanet_pvt-t-dtn_fpn_1x_coco.py', 'mask-rcnn_pvt-s-dtn_fpn_1x_coco.py', 'pvt-t-dtn_8xb128_in1k.py']
)
def test_no_weight_decay_on_dtn_norms_and_embeddings(name):
    cfg = load(ROOT / name)
    model = MODELS.build(cfg.model)
    decay = weight_decay_of_each_parameter(model, cfg.optim_wrapper)
    for parameter_name, p in model.backbone.named_parameters():
        spared = '.norm' in parameter_name or parameter_name.split('.')[-1] in ('pos_embed', 'cls_token', 'cls_pos')
        spared |= parameter_name.startswith('norm.') or (name.endswith('in1k.py') and p.dim() == 1)
        assert (decay[id(p)] == 0) == spared, parameter_name
    dtn = [p for m in model.modules() if isinstance(m, DTN) for p in m.parameters()]
    assert dtn and all(decay[id(p)] == 0 for p in dtn)


@pytest.mark.slow
@pytest.mark.parametrize(
    ('name', 'limit'),
    [
        ('t', 0.015),
        *(pytest.param(name, 0.025, marks=pytest.mark.exhaustive) for name in ('s', 'm', 'l', 'v2-b3')),
    ],
)
def test_flops_that_dtn_adds(name, limit):
    stem = f'pvt-{name}' if len(name) == 1 else f'pvt{name}'
    added = added_flops(ROOT / f'{stem}-dtn_8xb128_in1k.py', ROOT / f'{stem}_8xb128_in1k.py')
    assert 0 < added <= limit
