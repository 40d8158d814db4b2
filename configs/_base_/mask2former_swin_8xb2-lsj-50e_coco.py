_base_ = ['mmdet::mask2former/mask2former_swin-s-p4-w7-224_8xb2-lsj-50e_coco.py', './runtime.py']
custom_imports = _base_.runtime.custom_imports
train_cfg = _base_.runtime.train_cfg
default_hooks = _base_.runtime.default_hooks
custom_hooks = _base_.runtime.custom_hooks
visualizer = _base_.runtime.visualizer
model = dict(backbone=dict(_delete_=True, type='SwinDTN', drop_path_rate=0.3))
# MMDetection's config already has keys for all other norms. This norm needs a key, because downsampling belongs to
# stages 0 to 2 in MMDetection and to stages 1 to 3 here.
_norm = dict(lr_mult=0.1, decay_mult=0.0)
optim_wrapper = dict(paramwise_cfg=dict(custom_keys={'backbone.stages.3.downsample.norm': _norm}))
