# DINO's published training on ImageNet for 100 epochs, on 8 GPUs with 64 images each. Configs based on this file define
# the backbone and the head's in_channels.
_base_ = './dino.py'
data_preprocessor = dict(
    type='SelfSupDataPreprocessor', mean=[123.675, 116.28, 103.53], std=[58.395, 57.12, 57.375], to_rgb=True
)
_global_crop = dict(type='torchvision/RandomResizedCrop', size=224, scale=(0.4, 1.0), interpolation='bicubic')
_local_crop = dict(type='torchvision/RandomResizedCrop', size=96, scale=(0.05, 0.4), interpolation='bicubic')
_blur = dict(type='GaussianBlur', magnitude_range=(0.1, 2.0), magnitude_std='inf')  # uniform in this range
_views = [
    [_global_crop, *_base_.colours, dict(_blur, prob=1.0)],
    [_global_crop, *_base_.colours, dict(_blur, prob=0.1), dict(type='Solarize', thr=128, prob=0.2)],
    [_local_crop, *_base_.colours, dict(_blur, prob=0.5)],
]
_train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='NumpyToPIL', to_rgb=True),
    dict(type='MultiView', num_views=[1, 1, 8], transforms=_views),
    dict(type='PackInputs'),
]
_test_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='ResizeEdge', scale=256, edge='short', backend='pillow', interpolation='bicubic'),
    dict(type='CenterCrop', crop_size=224),
    dict(type='PackInputs'),
]
_loader = dict(num_workers=10, persistent_workers=True, pin_memory=True, collate_fn=dict(type='default_collate'))
_in_order = dict(type='DefaultSampler', shuffle=False)
_imagenet = dict(type='ImageNet', data_root='data/imagenet')
train_dataloader = dict(
    **_loader,
    batch_size=64,
    drop_last=True,
    sampler=dict(type='DefaultSampler', shuffle=True),
    dataset=dict(**_imagenet, split='train', pipeline=_train_pipeline),
)
val_dataloader = dict(
    **_loader,
    batch_size=128,
    sampler=_in_order,
    dataset=dict(**_imagenet, split='val', pipeline=_test_pipeline),
)
_bank = dict(val_dataloader, dataset=dict(**_imagenet, split='train', pipeline=_test_pipeline))
# Every 20 epochs, validation images are classified by their nearest neighbours among all training images.
val_cfg = dict(type='KNNLoop', bank=_bank)
val_evaluator = []
test_dataloader = val_dataloader
test_cfg = dict(val_cfg, stage='test')
test_evaluator = []
train_cfg = dict(**_base_.runtime.train_cfg, max_epochs=100, val_interval=20)
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-6, by_epoch=True, end=10, convert_to_iter_based=True),
    dict(type='CosineAnnealingLR', eta_min=1e-6, by_epoch=True, begin=10, convert_to_iter_based=True),
    # The weight decay rises from 0.04 to 0.4. In parameter groups without weight decay, it remains 0.
    dict(type='CosineAnnealingWeightDecay', eta_min=0.4, by_epoch=True, convert_to_iter_based=True),
]
default_hooks = dict(checkpoint=dict(interval=5))
auto_scale_lr = dict(base_batch_size=512)
