_base_ = [
    'mmdet::_base_/models/retinanet_r50_fpn.py',
    'mmdet::_base_/datasets/coco_detection.py',
    './mmdet_runtime.py',
    './swin_1x.py',
]
train_cfg = _base_.runtime.train_cfg
# RetinaNet uses only the maps from the second stage on. The norm of an unused output would receive no gradient.
model = dict(
    backbone=dict(_delete_=True, type='SwinDTN', out_indices=(1, 2, 3)),
    neck=dict(in_channels=[192, 384, 768], start_level=0),
)
