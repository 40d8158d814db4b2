_base_ = [
    'mmdet::_base_/models/cascade-mask-rcnn_r50_fpn.py',
    'mmdet::_base_/datasets/coco_instance.py',
    './mmdet_runtime.py',
    './swin_1x.py',
    './ms-crop.py',
]
model = dict(
    backbone=dict(_delete_=True, type='SwinDTN'),
    neck=dict(in_channels=[96, 192, 384, 768]),
)
train_dataloader = dict(dataset=dict(pipeline=_base_.ms_crop))
train_cfg = dict(_base_.runtime.train_cfg, max_epochs=36)
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-3, by_epoch=False, begin=0, end=1000),
    dict(type='MultiStepLR', begin=0, end=36, by_epoch=True, milestones=[27, 33], gamma=0.1),
]
