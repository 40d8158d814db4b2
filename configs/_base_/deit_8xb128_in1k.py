# The DeiT recipe for 8 GPUs with 128 images each; a model adds its backbone and the head's in_channels. The learning
# rate, 5e-4 for each 512 images of a batch and so 1e-3 here, is that of MMPretrain's schedule.
_base_ = [
    'mmpretrain::_base_/datasets/imagenet_bs64_swin_224.py',
    'mmpretrain::_base_/schedules/imagenet_bs1024_adamw_swin.py',
    './mmpretrain_runtime.py',
    './no_decay.py',
]
train_cfg = dict(_delete_=True, **_base_.runtime.train_cfg, max_epochs=300, val_interval=1)  # without by_epoch
model = dict(
    type='mmpretrain.ImageClassifier',  # whose scope is said for those who inherit through mmdtn::
    head=dict(
        type='LinearClsHead',
        num_classes=1000,
        loss=dict(type='LabelSmoothLoss', label_smooth_val=0.1, mode='original'),
    ),
    train_cfg=dict(augments=[dict(type='Mixup', alpha=0.8), dict(type='CutMix', alpha=1.0)]),
)
# Repeated augmentation: three copies of an image in a batch, each augmented by itself.
train_dataloader = dict(batch_size=128, sampler=dict(type='RepeatAugSampler', shuffle=True))
optim_wrapper = dict(
    paramwise_cfg=dict(_delete_=True, bias_decay_mult=0.0, flat_decay_mult=0.0, **_base_.no_decay),
)
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-3, by_epoch=True, end=5, convert_to_iter_based=True),
    dict(type='CosineAnnealingLR', eta_min=1e-5, by_epoch=True, begin=5),
]
