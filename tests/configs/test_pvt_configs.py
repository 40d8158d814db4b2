"""Every config in configs/pvt: it builds, trains a step, infers, and says what the papers' recipes say."""

from pathlib import Path

import pytest
import torch
from mmengine.config import Config
from mmengine.optim import build_optim_wrapper
from mmengine.registry import MODELS, DefaultScope, init_default_scope
from mmengine.structures import InstanceData
from mmengine.utils import import_modules_from_strings

from mmdtn.norms import DTN

ROOT = Path(__file__).parents[2] / 'configs' / 'pvt'
DETECTION = sorted(p.name for p in ROOT.glob('*_coco.py'))
IMAGENET = sorted(p.name for p in ROOT.glob('*_in1k.py'))


def load(name):
    cfg = Config.fromfile(ROOT / name)
    import_modules_from_strings(**cfg.custom_imports)
    init_default_scope(cfg.default_scope)
    if 'init_cfg' in cfg.model.backbone:
        assert cfg.model.backbone.init_cfg.prefix == 'backbone.'
        cfg.model.backbone.init_cfg = None
    return cfg


@pytest.fixture(autouse=True)
def scope():
    yield
    DefaultScope._instance_dict.clear()


def image_and_objects(height, width):
    from mmdet.structures import DetDataSample
    from mmdet.structures.mask import BitmapMasks

    sample = DetDataSample(
        metainfo=dict(
            img_shape=(height, width),
            ori_shape=(height, width),
            scale_factor=(1.0, 1.0),
            batch_input_shape=(height, width),
        )
    )
    masks = torch.zeros(2, height, width)
    masks[0, 4:40, 4:40] = masks[1, 20:60, 30:70] = 1
    boxes = torch.tensor([[4.0, 4, 40, 40], [30.0, 20, 70, 60]])
    masks = BitmapMasks(masks.numpy().astype('uint8'), height, width)
    sample.gt_instances = InstanceData(bboxes=boxes, labels=torch.tensor([3, 79]), masks=masks)
    return torch.randint(0, 256, (3, height, width), dtype=torch.uint8), sample


def step(model, batch):
    """One training step with the model's own data preprocessor; every parameter must move or at least be reached."""
    data = model.data_preprocessor(batch, training=True)
    losses = model(**data, mode='loss')
    loss, _ = model.parse_losses(losses)
    assert loss.isfinite()
    loss.backward()
    unused = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    assert unused == []


@pytest.mark.parametrize('name', DETECTION)
def test_detector_trains_a_step_and_infers(name):
    cfg = load(name)
    model = MODELS.build(cfg.model)
    model.init_weights()
    image, sample = image_and_objects(64, 96)
    step(model, dict(inputs=[image], data_samples=[sample]))
    model.eval()
    with torch.no_grad():
        (result,) = model.test_step(dict(inputs=[image], data_samples=[sample]))
    assert set(result.pred_instances.keys()) >= {'bboxes', 'scores', 'labels'}
    assert ('masks' in result.pred_instances) == name.startswith('mask-rcnn')
    assert bool([m for m in model.backbone.modules() if isinstance(m, DTN)]) == ('-dtn' in name)


@pytest.mark.parametrize('name', DETECTION)
def test_detection_recipe(name):
    cfg = load(name)
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


@pytest.mark.parametrize('name', IMAGENET)
def test_classifier_trains_a_step_and_infers(name):
    from mmpretrain.structures import DataSample

    cfg = load(name)
    model = MODELS.build(dict(cfg.model, data_preprocessor=cfg.data_preprocessor))
    model.init_weights()
    samples = [DataSample().set_gt_label(i) for i in (1, 7)]
    images = [torch.randint(0, 256, (3, 64, 64), dtype=torch.uint8) for _ in samples]
    step(model, dict(inputs=torch.stack(images), data_samples=samples))
    model.eval()
    with torch.no_grad():
        results = model.test_step(dict(inputs=images, data_samples=samples))
    assert [r.pred_score.shape for r in results] == [(1000,)] * 2


@pytest.mark.parametrize('name', IMAGENET)
def test_deit_recipe(name):
    cfg = load(name)
    optimizer = cfg.optim_wrapper.optimizer
    assert (optimizer.type, optimizer.lr, optimizer.weight_decay) == ('AdamW', 5e-4, 0.05)
    assert cfg.train_dataloader.batch_size == 128 and cfg.auto_scale_lr.base_batch_size == 1024
    assert cfg.train_cfg.max_epochs == 300 and cfg.param_scheduler[0].end == cfg.param_scheduler[1].begin == 5
    assert {a.type: a.alpha for a in cfg.model.train_cfg.augments} == {'Mixup': 0.8, 'CutMix': 1.0}
    assert cfg.model.head.loss.label_smooth_val == 0.1
    transforms = {t.type: t for t in cfg.train_dataloader.dataset.pipeline}
    assert transforms['RandAugment'].magnitude_level == 9 and transforms['RandAugment'].magnitude_std == 0.5
    assert transforms['RandomErasing'].erase_prob == 0.25


@pytest.mark.parametrize(
    'name', ['retinanet_pvt-t-dtn_fpn_1x_coco.py', 'mask-rcnn_pvt-s-dtn_fpn_1x_coco.py', 'pvt-t-dtn_8xb128_in1k.py']
)
def test_no_weight_decay_on_dtn_norms_and_embeddings(name):
    cfg = load(name)
    model = MODELS.build(cfg.model)
    wrapper = build_optim_wrapper(model, cfg.optim_wrapper)
    decay = {id(p): group['weight_decay'] for group in wrapper.optimizer.param_groups for p in group['params']}
    learning_rates = {group['lr'] for group in wrapper.optimizer.param_groups}
    assert learning_rates == {cfg.optim_wrapper.optimizer.lr}
    for parameter_name, p in model.backbone.named_parameters():
        spared = '.norm' in parameter_name or parameter_name.split('.')[-1] in ('pos_embed', 'cls_token', 'cls_pos')
        spared |= parameter_name.startswith('norm.') or (name.endswith('in1k.py') and p.dim() == 1)
        assert (decay[id(p)] == 0) == spared, parameter_name
    dtn = [p for m in model.modules() if isinstance(m, DTN) for p in m.parameters()]
    assert dtn and all(decay[id(p)] == 0 for p in dtn)


@pytest.mark.parametrize(('name', 'limit'), [('t', 0.015), ('s', 0.025), ('m', 0.025), ('l', 0.025), ('v2-b3', 0.025)])
def test_flops_that_dtn_adds(name, limit):
    from tools.analysis_tools.get_flops import count

    stem = f'pvt-{name}' if len(name) == 1 else f'pvt{name}'
    with_dtn, _ = count(str(ROOT / f'{stem}-dtn_8xb128_in1k.py'), (224, 224))
    with_ln, _ = count(str(ROOT / f'{stem}_8xb128_in1k.py'), (224, 224))
    assert 0 < with_dtn / with_ln - 1 <= limit
