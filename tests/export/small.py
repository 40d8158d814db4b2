"""Small models with random weights, as configs and checkpoints."""

from pathlib import Path

import mmcv
import numpy as np
import torch
from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope

from tests.backbones.helpers import randomised

SIDE = 192
PICTURES = """
test_dataloader = dict(
    dataset=dict(
        type='{dataset}',
        metainfo=dict(classes=('checked', 'cross', 'ring', 'striped', 'triangle')),
        pipeline=[dict(type='LoadImageFromFile'), {steps}, dict(type='{pack}')],
    )
)
"""
DETECTED = PICTURES.format(
    dataset='CocoDataset', steps=f"dict(type='Resize', scale=({SIDE}, {SIDE}), keep_ratio=True)", pack='PackDetInputs'
)
RETINANET = (
    """
_base_ = 'mmdet::_base_/models/retinanet_r50_fpn.py'
default_scope = 'mmdet'
custom_imports = dict(imports=['mmdtn', 'tests.export.small'])
model = dict(
    backbone=dict(
        _delete_=True,
        type='PVTDTN',
        arch=dict(base='tiny', depths=(1, 0, 1, 0), widths=(8, 8, 20, 8), mlp_ratios=(1, 1, 1, 1)),
        out_indices=(1, 2),
    ),
    neck=dict(in_channels=[8, 20], out_channels=8, start_level=0, add_extra_convs=False, num_outs=2),
    bbox_head=dict(
        num_classes=5,
        in_channels=8,
        feat_channels=8,
        stacked_convs=1,
        anchor_generator=dict(scales_per_octave=1, strides=[8, 16]),
    ),
    test_cfg=dict(nms_pre=400, max_per_img=30),
)
"""
    + DETECTED
)
MASK_RCNN = (
    """
_base_ = 'mmdet::_base_/models/mask-rcnn_r50_fpn.py'
default_scope = 'mmdet'
custom_imports = dict(imports=['mmdtn'])
_arch = dict(base='tiny', depths=(1, 0, 1, 0), widths=(8, 8, 20, 8), mlp_ratios=(1, 1, 1, 1))
_extractor = dict(out_channels=8, featmap_strides=[8, 16], finest_scale=28)
model = dict(
    backbone=dict(_delete_=True, type='PVTDTN', arch=_arch, out_indices=(1, 2)),
    neck=dict(in_channels=[8, 20], out_channels=8, num_outs=2),
    rpn_head=dict(in_channels=8, feat_channels=8, anchor_generator=dict(scales=[4], strides=[8, 16])),
    roi_head=dict(
        bbox_roi_extractor=_extractor,
        bbox_head=dict(in_channels=8, fc_out_channels=16, num_classes=5),
        mask_roi_extractor=_extractor,
        mask_head=dict(in_channels=8, conv_out_channels=8, num_convs=1, num_classes=5),
    ),
    test_cfg=dict(rpn=dict(nms_pre=100, max_per_img=200), rcnn=dict(max_per_img=200)),
)
"""
    + DETECTED
)
CLASSIFIER = """
default_scope = 'mmpretrain'
custom_imports = dict(imports=['mmdtn'])
model = dict(
    type='ImageClassifier',
    backbone=dict(type='ViTDTN', arch=dict(width=24, depth=2, num_heads=3, mlp_ratio=2), dtn_layers=1, img_size=64),
    head=dict(type='LinearClsHead', num_classes=5, in_channels=24),
    data_preprocessor=dict(mean=[123.7, 116.3, 103.5], std=[58.4, 57.1, 57.4], to_rgb=True),
)
""" + PICTURES.format(
    dataset='CustomDataset',
    steps="dict(type='ResizeEdge', scale=73, edge='short', backend='pillow', interpolation='bicubic'), "
    "dict(type='CenterCrop', crop_size=64)",
    pack='PackInputs',
)
LEVIT = CLASSIFIER.replace(
    "type='ViTDTN', arch=dict(width=24, depth=2, num_heads=3, mlp_ratio=2), dtn_layers=1, img_size=64",
    "type='LeViTDTN', img_size=64, arch=dict(widths=(16, 16, 24), key_width=8, num_heads=(2, 2, 3), depths=(1, 1, 1), "
    'drop_path_rate=0.0)',
)


def write(folder: Path, text: str, more: str = '') -> tuple[str, str]:
    """Writes a config and a checkpoint with random weights and returns their paths."""
    config, checkpoint = folder / 'config.py', folder / 'weights.pth'
    config.write_text(text + more)
    cfg = Config.fromfile(config)
    init_default_scope(cfg.default_scope)
    torch.manual_seed(0)
    model = MODELS.build(cfg.model)
    model.init_weights()
    randomised(model)
    if hasattr(model, 'bbox_head') and hasattr(model.bbox_head, 'retina_cls'):
        sharpen(model)
    if hasattr(model, 'roi_head'):
        sharpen_regions(model)
    torch.save(dict(state_dict=model.state_dict(), meta={}), checkpoint)
    return str(config), str(checkpoint)


@torch.no_grad()
def sharpen(detector) -> None:
    """Scales the weights so that logits reach from below -4 to 3, and scores of a uniform image are low."""
    last = detector.bbox_head.retina_cls
    last.weight.normal_()
    last.bias.zero_()
    noise = torch.randn(1, 3, SIDE, SIDE)
    least, most = (
        max(level.max() for level in detector(x, mode='tensor')[0]) for x in (torch.zeros_like(noise), noise)
    )
    last.weight.mul_(7 / (most - least))
    last.bias.fill_(-4 - 7 * least / (most - least))
    detector.bbox_head.retina_reg.weight.normal_(std=0.3)


@torch.no_grad()
def sharpen_regions(detector) -> None:
    """Scales the weights of the second stage so that scores, boxes and masks differ between positions."""
    detector.rpn_head.rpn_cls.weight.normal_()
    head, masks = detector.roi_head.bbox_head, detector.roi_head.mask_head
    head.fc_cls.weight.normal_(std=0.2)
    head.fc_reg.weight.normal_(std=0.3)
    masks.conv_logits.weight.normal_(std=4)


def write_picture(path: Path, height: int, width: int, even: bool = False) -> Path:
    from mmdtn.export.verify import picture

    mean = np.broadcast_to(np.uint8([124, 116, 104]), (height, width, 3))
    mmcv.imwrite((mean if even else picture(height, height, width))[..., ::-1].copy(), str(path))
    return path
