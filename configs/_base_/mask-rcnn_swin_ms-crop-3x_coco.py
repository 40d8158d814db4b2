_base_ = ['mmdet::swin/mask-rcnn_swin-t-p4-w7_fpn_ms-crop-3x_coco.py', './runtime.py']
custom_imports = _base_.runtime.custom_imports
train_cfg = _base_.runtime.train_cfg
default_hooks = _base_.runtime.default_hooks
custom_hooks = _base_.runtime.custom_hooks
visualizer = _base_.runtime.visualizer
model = dict(backbone=dict(_delete_=True, type='SwinDTN'))
