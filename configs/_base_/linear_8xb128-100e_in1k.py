# DINO's linear evaluation of a frozen backbone on ImageNet, on 8 GPUs with 128 images each. Configs based on this file
# define the backbone.
_base_ = './mmpretrain_runtime.py'
# The classifiers' learning rates for a batch of 256 images. The published value is 1e-3.
_rates = [1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 1e-1]
model = dict(
    type='LinearProbe',
    backbone=dict(type='ViTDTN', drop_path_rate=0.0),
    num_classes=1000,
    rates=_rates,
    features='cls+mean',  # 'last4' needs a class token in the last four blocks
)
data_preprocessor = dict(
    type='mmpretrain.ClsDataPreprocessor', mean=[123.675, 116.28, 103.53], std=[58.395, 57.12, 57.375], to_rgb=True
)
_train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='RandomResizedCrop', scale=224, backend='pillow'),
    dict(type='RandomFlip', prob=0.5, direction='horizontal'),
    dict(type='PackInputs'),
]
_test_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='ResizeEdge', scale=256, edge='short', backend='pillow', interpolation='bicubic'),
    dict(type='CenterCrop', crop_size=224),
    dict(type='PackInputs'),
]
_loader = dict(batch_size=128, num_workers=10, persistent_workers=True, pin_memory=True)
_imagenet = dict(type='ImageNet', data_root='data/imagenet')
train_dataloader = dict(
    **_loader,
    sampler=dict(type='DefaultSampler', shuffle=True),
    dataset=dict(**_imagenet, split='train', pipeline=_train_pipeline),
)
val_dataloader = dict(
    **_loader,
    sampler=dict(type='DefaultSampler', shuffle=False),
    dataset=dict(**_imagenet, split='val', pipeline=_test_pipeline),
)
val_evaluator = dict(type='ProbeAccuracy', rates=_rates)
val_cfg = dict()
test_dataloader = val_dataloader
test_evaluator = val_evaluator
test_cfg = dict()
# The learning rates are scaled from a batch of 256 images to one of 1024 images.
optim_wrapper = dict(
    optimizer=dict(type='SGD', lr=1024 / 256, momentum=0.9, weight_decay=0.0),
    paramwise_cfg=dict(custom_keys={f'head.probes.{i}.': dict(lr_mult=rate) for i, rate in enumerate(_rates)}),
)
param_scheduler = dict(type='CosineAnnealingLR', eta_min=0.0, by_epoch=True)
train_cfg = dict(**_base_.runtime.train_cfg, max_epochs=100, val_interval=1)
default_hooks = dict(checkpoint=dict(interval=1, max_keep_ckpts=1, save_best='accuracy/top1'))
auto_scale_lr = dict(base_batch_size=1024)
