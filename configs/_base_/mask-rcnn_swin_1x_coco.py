_base_ = [
    'mmdet::_base_/models/mask-rcnn_r50_fpn.py',
    'mmdet::_base_/datasets/coco_instance.py',
    './mmdet_runtime.py',
    './swin_1x.py',
]
train_cfg = _base_.runtime.train_cfg
model = dict(
    backbone=dict(_delete_=True, type='SwinDTN'),
    neck=dict(in_channels=[96, 192, 384, 768]),
)
