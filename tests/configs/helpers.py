"""Helpers for the tests of the configs of all families."""

import copy
import functools
from pathlib import Path

import torch
from mmengine.config import Config
from mmengine.optim import build_optim_wrapper
from mmengine.registry import MODELS, init_default_scope
from mmengine.structures import InstanceData, PixelData
from mmengine.utils import import_modules_from_strings
from torch import nn

from mmdtn.models import read_config
from mmdtn.norms import DTN

read = functools.cache(Config.fromfile)  # cached because many tests read the same config


def load(path: Path) -> Config:
    """Reads a config and removes the pretrained checkpoint of its backbone."""
    cfg = copy.deepcopy(read(path))
    import_modules_from_strings(**cfg.custom_imports)
    init_default_scope(cfg.default_scope)
    if 'init_cfg' in cfg.model.backbone:
        assert cfg.model.backbone.init_cfg.get('prefix', 'backbone.') == 'backbone.'
        cfg.model.backbone.init_cfg = None
    return cfg


def classifier_trains_a_step_and_infers(path: Path, side: int = 64) -> None:
    from mmpretrain.structures import DataSample

    cfg = load(path)
    model = MODELS.build(dict(cfg.model, data_preprocessor=cfg.data_preprocessor))
    model.init_weights()
    samples = [DataSample().set_gt_label(i) for i in (1, 7)]
    images = [torch.randint(0, 256, (3, side, side), dtype=torch.uint8) for _ in samples]
    step(model, dict(inputs=torch.stack(images), data_samples=samples))
    model.eval()
    with torch.no_grad():
        results = model.test_step(dict(inputs=images, data_samples=samples))
    assert [r.pred_score.shape for r in results] == [(cfg.model.head.num_classes,)] * 2
    assert bool([m for m in model.backbone.modules() if isinstance(m, DTN)]) == ('-dtn' in path.name)


def image_and_objects(height: int, width: int):
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
    stuff = torch.full((1, height, width), 100)  # for panoptic segmentation, where classes 0 to 79 are things
    sample.gt_sem_seg = PixelData(sem_seg=stuff)
    return torch.randint(0, 256, (3, height, width), dtype=torch.uint8), sample


def step(model: nn.Module, batch: dict) -> None:
    """Runs one training step and checks that every trainable parameter has a gradient."""
    data = model.data_preprocessor(batch, training=True)
    losses = model(**data, mode='loss')
    loss, _ = model.parse_losses(losses)
    assert loss.isfinite()
    loss.backward()
    unused = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    assert unused == []


def weight_decay_of_each_parameter(model: nn.Module, optim_wrapper: dict) -> dict[int, float]:
    """Returns the weight decay by ``id`` of the parameter, and checks that all have the config's learning rate."""
    wrapper = build_optim_wrapper(model, optim_wrapper)
    assert {group['lr'] for group in wrapper.optimizer.param_groups} == {optim_wrapper['optimizer']['lr']}
    return {id(p): group['weight_decay'] for group in wrapper.optimizer.param_groups for p in group['params']}


def added_flops(with_dtn: Path, with_ln: Path, side: int = 224) -> float:
    """Computes the share of FLOPs that DTN adds for images of ``side`` pixels."""
    from tools.analysis_tools.get_flops import count, counted

    flops, without = (count(counted(read_config(config)), (side, side))[0] for config in (with_dtn, with_ln))
    return flops / without - 1
