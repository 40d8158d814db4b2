_base_ = ['mmdet::panoptic_fpn/panoptic-fpn_r50_fpn_1x_coco.py', './no_decay.py', './runtime.py']
custom_imports = _base_.runtime.custom_imports
train_cfg = _base_.runtime.train_cfg
default_hooks = _base_.runtime.default_hooks
custom_hooks = _base_.runtime.custom_hooks
visualizer = _base_.runtime.visualizer
model = dict(backbone=dict(_delete_=True, type='PVTDTN'), neck=dict(in_channels=[64, 128, 320, 512]))
optim_wrapper = dict(
    optimizer=dict(_delete_=True, type='AdamW', lr=2e-4, weight_decay=1e-4),
    paramwise_cfg=_base_.no_decay,
)
