"""Every detector in configs/ has existing pretrained weights, trains, infers, and has a baseline with LayerNorm."""

import re
from pathlib import Path

import mmdet
import pytest
import torch
from mmengine.optim import build_optim_wrapper
from mmengine.registry import MODELS

from mmdtn.norms import DTN

from .helpers import image_and_objects, load, read, step

CONFIGS = Path(__file__).parents[2] / 'configs'
DETECTORS = sorted(p.relative_to(CONFIGS).as_posix() for p in CONFIGS.glob('*/*_coco*.py'))
DETECTORS = [name for name in DETECTORS if not name.startswith('_base_')]
PAIRS = [name for name in DETECTORS if '-dtn_' in name and '_dtn-in1k_' not in name and '_ms-1x_' not in name]
SIZE = (64, 96)
PANOPTIC = ('panoptic-fpn', 'coco-panoptic')


def test_the_configs_are_there():
    assert len(DETECTORS) == 48 and len(PAIRS) == 19


@pytest.mark.slow
@pytest.mark.parametrize('name', [name for name in DETECTORS if '_ms-1x_' not in name])
def test_detector_trains_a_step_and_infers(name):
    cfg = load(CONFIGS / name)
    few_places(cfg.model)
    model = MODELS.build(cfg.model)
    model.init_weights()
    image, sample = image_and_objects(*SIZE)
    step(model, dict(inputs=[image], data_samples=[sample]))
    model.eval()
    with torch.no_grad():
        (result,) = model.test_step(dict(inputs=[image], data_samples=[sample]))
    if any(kind in name for kind in PANOPTIC):
        assert result.pred_panoptic_seg.sem_seg.shape[-2:] == SIZE
    else:
        assert set(result.pred_instances.keys()) >= {'bboxes', 'scores', 'labels'}
        assert ('masks' in result.pred_instances) == any(kind in name for kind in ('mask-rcnn', 'mask2former'))
    assert bool([m for m in model.backbone.modules() if isinstance(m, DTN)]) == ('-dtn_' in name)


def few_places(model):
    """Reduces the number of queries and regions, and the size of the input, so that tests are fast."""
    for augment in model.data_preprocessor.get('batch_augments') or []:
        augment.size = SIZE
    if model.type == 'DINO':
        model.num_queries = 100
    if 'roi_head' in model:
        stages = model.train_cfg.rcnn
        for stage in stages if isinstance(stages, list) else [stages]:
            stage.sampler.num = 32
        model.test_cfg.rpn.max_per_img = 100


@pytest.mark.parametrize('name', PAIRS)
def test_dtn_starts_from_the_weights_of_its_layernorm_sibling(name):
    with_dtn, with_ln = read(CONFIGS / name), read(CONFIGS / name.replace('-dtn', ''))
    start, baseline = with_dtn.model.backbone.init_cfg, with_ln.model.backbone.init_cfg
    assert start == dict(baseline, warm_start=0.999)
    settings = [cfg.to_dict() for cfg in (with_dtn, with_ln)]
    for cfg in settings:
        for key in ('arch', 'norm_cfg', 'init_cfg'):
            cfg['model']['backbone'].pop(key)
    assert settings[0] == settings[1]


@pytest.mark.parametrize('name', DETECTORS)
def test_the_weights_exist_or_a_config_makes_them(name):
    checkpoint = read(CONFIGS / name).model.backbone.init_cfg.checkpoint
    if '_dtn-in1k_' not in name:
        assert checkpoint in urls_of_mmdetection()
        return
    _, config, file = Path(checkpoint).parts
    (path,) = CONFIGS.glob(f'*/{config}.py')
    classifier = read(path)
    assert file == f'epoch_{classifier.train_cfg.max_epochs}.pth'
    assert classifier.model.backbone.arch == read(CONFIGS / name).model.backbone.arch


@pytest.mark.parametrize('name', [name for name in DETECTORS if name.startswith('swin/cascade')])
def test_3x_schedule_and_pipeline_are_those_that_mask_rcnn_inherits_from_mmdetection(name):
    ours, theirs = read(CONFIGS / name), read(CONFIGS / 'swin/mask-rcnn_swin-t_fpn_ms-crop-3x_coco.py')
    for key in ('train_dataloader', 'train_cfg'):
        assert ours[key] == theirs[key], key
    assert [dict(s, _scope_='mmdet') for s in ours.param_scheduler] == theirs.param_scheduler


@pytest.mark.parametrize('name', PAIRS)
def test_learning_rates_and_weight_decay(name):
    cfg = load(CONFIGS / name)
    with torch.device('meta'):
        model = MODELS.build(cfg.model)
    wrapper = build_optim_wrapper(model, cfg.optim_wrapper)
    backbone_lr = cfg.optim_wrapper.optimizer.lr * (0.1 if name.startswith(('swin/dino', 'swin/mask2former')) else 1)
    groups = {id(p): group for group in wrapper.optimizer.param_groups for p in group['params']}
    spared = r'(.*\.)?norm\d?\..*|.*(pos_embed|relative_position_bias_table)'
    for key, parameter in model.backbone.named_parameters():
        group = groups[id(parameter)]
        assert group['lr'] == pytest.approx(backbone_lr), key
        assert (group['weight_decay'] == 0) == bool(re.fullmatch(spared, key)), key


def urls_of_mmdetection():
    """Returns the URLs of pretrained weights in MMDetection's own configs."""
    folder = Path(mmdet.__file__).parent / '.mim' / 'configs'
    text = ''.join(p.read_text() for family in ('pvt', 'swin') for p in folder.glob(f'{family}/*.py'))
    text = re.sub(r"'\s*\n\s*'", '', text)
    return re.findall(r"'(https://[^']+\.pth)'", text)
