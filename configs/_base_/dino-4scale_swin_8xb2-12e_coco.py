_base_ = ['mmdet::dino/dino-4scale_r50_8xb2-12e_coco.py', './runtime.py']
custom_imports = _base_.runtime.custom_imports
train_cfg = _base_.runtime.train_cfg
default_hooks = _base_.runtime.default_hooks
custom_hooks = _base_.runtime.custom_hooks
visualizer = _base_.runtime.visualizer
model = dict(
    backbone=dict(_delete_=True, type='SwinDTN', out_indices=(1, 2, 3)),
    neck=dict(in_channels=[192, 384, 768]),
)
# The longest key that occurs in a parameter's name takes precedence, so norm keys must be longer than 'backbone'.
_norms = ['backbone.norm', 'patch_embed.norm', 'downsample.norm', *(f'blocks.{i}.norm' for i in range(18))]
optim_wrapper = dict(
    paramwise_cfg=dict(
        custom_keys={
            'backbone': dict(lr_mult=0.1),
            **{name: dict(lr_mult=0.1, decay_mult=0.0) for name in [*_norms, 'relative_position_bias_table']},
        }
    ),
)
