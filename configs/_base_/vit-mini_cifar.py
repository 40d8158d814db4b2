# A small ViT for images of 32 pixels, with the DeiT recipe at batch size 128 on one GPU. Inherit this file together
# with one of MMPretrain's CIFAR datasets.
_base_ = ['./mmpretrain_runtime.py', './no_decay.py']
model = dict(
    type='mmpretrain.ImageClassifier',  # configs that inherit through mmdtn:: need the scope
    backbone=dict(
        type='ViTDTN',
        arch=dict(width=180, depth=7, num_heads=9, mlp_ratio=4),
        dtn_layers=5,
        img_size=32,
        patch_size=4,
    ),
    head=dict(
        type='LinearClsHead',
        num_classes=10,
        in_channels=180,
        loss=dict(type='LabelSmoothLoss', label_smooth_val=0.1, mode='original'),
    ),
    train_cfg=dict(augments=[dict(type='Mixup', alpha=0.8), dict(type='CutMix', alpha=1.0)]),
)
_cifar_mean, _cifar_std = [125.307, 122.961, 113.8575], [51.5865, 50.847, 51.255]  # RGB, as in MMPretrain's CIFAR
train_transforms = [
    dict(type='RandomCrop', crop_size=32, padding=4),
    dict(type='RandomFlip', prob=0.5, direction='horizontal'),
    dict(
        type='RandAugment',
        policies='timm_increasing',
        num_policies=2,
        total_level=10,
        magnitude_level=9,
        magnitude_std=0.5,
        hparams=dict(pad_val=[round(x) for x in _cifar_mean], interpolation='bicubic'),
    ),
    dict(
        type='RandomErasing',
        erase_prob=0.25,
        mode='rand',
        min_area_ratio=0.02,
        max_area_ratio=1 / 3,
        fill_color=_cifar_mean,
        fill_std=_cifar_std,
    ),
    dict(type='PackInputs'),
]
optim_wrapper = dict(
    optimizer=dict(type='AdamW', lr=1e-3, weight_decay=0.05),
    paramwise_cfg=dict(bias_decay_mult=0.0, flat_decay_mult=0.0, **_base_.no_decay),
)
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-3, by_epoch=True, end=10, convert_to_iter_based=True),
    dict(type='CosineAnnealingLR', eta_min=1e-5, by_epoch=True, begin=10, convert_to_iter_based=True),
]
train_cfg = dict(**_base_.runtime.train_cfg, max_epochs=300, val_interval=1)
val_cfg = dict()
test_cfg = dict()
default_hooks = dict(checkpoint=dict(interval=10, max_keep_ckpts=3, save_best='accuracy/top1'))
auto_scale_lr = dict(base_batch_size=128)
