_base_ = [
    'mmdet::_base_/models/mask-rcnn_r50_fpn.py',
    'mmdet::_base_/datasets/coco_instance.py',
    'mmdet::_base_/schedules/schedule_1x.py',
    './mmdet_runtime.py',
    './no_decay.py',
]
train_cfg = _base_.runtime.train_cfg
model = dict(
    backbone=dict(_delete_=True, type='PVTDTN'),
    neck=dict(in_channels=[64, 128, 320, 512]),
)
optim_wrapper = dict(
    optimizer=dict(_delete_=True, type='AdamW', lr=2e-4, weight_decay=1e-4),
    paramwise_cfg=_base_.no_decay,
)
