# LeViT's recipe for 8 GPUs with 256 images each and 1000 epochs. The recipe extends MMPretrain's with parts of the
# authors' code. Without distillation, the model has a single head, which is trained on labels.
_base_ = ['mmpretrain::levit/levit-128s_8xb256_in1k.py', './no_decay.py', './runtime.py']
custom_imports = _base_.runtime.custom_imports
train_cfg = dict(_delete_=True, **_base_.runtime.train_cfg, max_epochs=1000, val_interval=1)  # removes by_epoch
default_hooks = _base_.runtime.default_hooks
visualizer = _base_.runtime.visualizer
model = dict(
    backbone=dict(_delete_=True, type='LeViTDTN', arch='128s'),
    neck=None,  # the backbone already averages its last map
    head=dict(distillation=False, in_channels=384),
)
train_dataloader = dict(sampler=dict(type='RepeatAugSampler', shuffle=True))
optim_wrapper = dict(
    paramwise_cfg=dict(_delete_=True, bias_decay_mult=0.0, flat_decay_mult=0.0, **_base_.no_decay),
)
custom_hooks = [
    dict(type='AdaptiveClipHook', clip_factor=0.01),
    # The moving average, with a decay of 0.99996, includes the statistics of batch norms.
    dict(type='EMAHook', momentum=4e-5, update_buffers=True, priority='ABOVE_NORMAL'),
    *_base_.runtime.custom_hooks,
]
