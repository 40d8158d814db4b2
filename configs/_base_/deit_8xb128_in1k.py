# The DeiT recipe for 8 GPUs with 128 images each. Configs add the backbone and the head's in_channels. As in
# MMPretrain's schedule, the learning rate is 1e-3, or 5e-4 per 512 images in a batch.
_base_ = [
    'mmpretrain::_base_/datasets/imagenet_bs64_swin_224.py',
    'mmpretrain::_base_/schedules/imagenet_bs1024_adamw_swin.py',
    './mmpretrain_runtime.py',
    './no_decay.py',
]
train_cfg = dict(_delete_=True, **_base_.runtime.train_cfg, max_epochs=300, val_interval=1)  # removes by_epoch
model = dict(
    type='mmpretrain.ImageClassifier',  # configs that inherit through mmdtn:: need the scope
    head=dict(
        type='LinearClsHead',
        num_classes=1000,
        loss=dict(type='LabelSmoothLoss', label_smooth_val=0.1, mode='original'),
    ),
    train_cfg=dict(augments=[dict(type='Mixup', alpha=0.8), dict(type='CutMix', alpha=1.0)]),
)
# With repeated augmentation, a batch contains three independently augmented copies of each image.
train_dataloader = dict(batch_size=128, sampler=dict(type='RepeatAugSampler', shuffle=True))
optim_wrapper = dict(
    paramwise_cfg=dict(_delete_=True, bias_decay_mult=0.0, flat_decay_mult=0.0, **_base_.no_decay),
)
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-3, by_epoch=True, end=5, convert_to_iter_based=True),
    dict(type='CosineAnnealingLR', eta_min=1e-5, by_epoch=True, begin=5),
]
