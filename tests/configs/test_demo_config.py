"""The config of the demo reads the generated data, trains on it and infers."""

from pathlib import Path

import pytest
import torch
from mmengine.config import Config
from mmengine.dataset import pseudo_collate
from mmengine.optim import build_optim_wrapper
from mmengine.registry import DATASETS, MODELS, init_default_scope
from mmengine.utils import import_modules_from_strings
from torch import nn

from mmdtn.datasets import CLASSES, METAINFO, write_coco
from mmdtn.norms import DTN

CONFIG = Path(__file__).parents[2] / 'configs' / 'demo' / 'mask-rcnn_pvt-dtn_shapes.py'


@pytest.fixture
def cfg():
    cfg = Config.fromfile(CONFIG)
    import_modules_from_strings(**cfg.custom_imports)
    init_default_scope(cfg.default_scope)
    return cfg


def test_it_names_the_classes_of_the_data(cfg):
    for loader in (cfg.train_dataloader, cfg.val_dataloader, cfg.test_dataloader):
        assert tuple(loader.dataset.metainfo.classes) == CLASSES
        assert [tuple(colour) for colour in loader.dataset.metainfo.palette] == METAINFO['palette']
    heads = cfg.model.roi_head
    assert heads.bbox_head.num_classes == heads.mask_head.num_classes == len(CLASSES)
    assert 'train' in cfg.train_dataloader.dataset.ann_file and 'val' in cfg.val_evaluator.ann_file
    assert cfg.val_dataloader.dataset.data_prefix.img == 'val/'


def test_its_start_is_wide_for_linear_layers_and_dtns_own_for_dtn(cfg):
    backbone = MODELS.build(cfg.model.backbone)
    layers = [m for m in backbone.modules() if isinstance(m, DTN)]
    before = [p.clone() for layer in layers for p in layer.parameters()]
    backbone.init_weights()
    after = [p for layer in layers for p in layer.parameters()]
    assert layers and all(torch.equal(*pair) for pair in zip(before, after, strict=True))
    for linear in (m for m in backbone.modules() if isinstance(m, nn.Linear)):
        expected = (2 / sum(linear.weight.shape)) ** 0.5
        assert abs(linear.weight.std() / expected - 1) < 0.15


def test_it_trains_a_step_on_generated_pictures_and_infers(cfg, tmp_path):
    root = write_coco(tmp_path / 'shapes', train=2, val=1)
    cfg.train_dataloader.dataset.data_root = cfg.test_dataloader.dataset.data_root = str(root)
    train = DATASETS.build(cfg.train_dataloader.dataset)
    test = DATASETS.build(cfg.test_dataloader.dataset)
    model = MODELS.build(cfg.model)
    model.init_weights()
    assert any(isinstance(m, DTN) for m in model.backbone.modules())

    data = model.data_preprocessor(pseudo_collate([train[0], train[1]]), training=True)
    loss, terms = model.parse_losses(model(**data, mode='loss'))
    assert loss.isfinite() and {'loss_rpn_cls', 'loss_cls', 'loss_bbox', 'loss_mask'} <= terms.keys()
    loss.backward()
    assert [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None] == []

    model.eval()
    with torch.no_grad():
        (result,) = model.test_step(pseudo_collate([test[0]]))
    assert result.pred_instances.masks.shape[1:] == result.ori_shape
    assert len(result.gt_instances) > 0, 'the truth comes along, to be drawn beside'


def test_what_all_places_share_does_not_drown_what_tells_them_apart(cfg):
    """Otherwise, the box head predicts the same for all boxes for hundreds of iterations."""
    neck = MODELS.build(cfg.model.neck)
    neck.init_weights()
    shared = 5 * torch.randn(1, 160, 1, 1)
    maps = [torch.randn(2, c, s, s) + shared[:, :c] for c, s in zip(cfg.widths, (40, 20, 10, 5), strict=True)]
    for out in neck(maps):
        assert out.mean((2, 3)).abs().max() < 1e-4 and out.std((2, 3)).min() > 0.9


def test_the_box_heads_first_layer_takes_small_steps(cfg):
    """The 3136 inputs of the layer have the same sign, so a step of AdamW changes its outputs too much."""
    model = MODELS.build(cfg.model)
    groups = build_optim_wrapper(model, cfg.optim_wrapper).param_groups
    first = model.roi_head.bbox_head.shared_fcs[0].weight
    (rate,) = {group['lr'] for group in groups for p in group['params'] if p is first}
    assert rate * first.shape[1] < 0.5 and {group['lr'] for group in groups} == {rate, cfg.optim_wrapper.optimizer.lr}
