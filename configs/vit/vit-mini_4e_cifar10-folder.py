# The learning check of README.md: four epochs on images in class folders. Strong augmentation is disabled, because it
# helps only in long training runs.
_base_ = './vit-mini_b128_cifar10.py'
model = dict(backbone=dict(drop_path_rate=0.0), train_cfg=dict(_delete_=True))
data_preprocessor = dict(to_rgb=True)
_train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='RandomCrop', crop_size=32, padding=4),
    dict(type='RandomFlip', prob=0.5, direction='horizontal'),
    dict(type='PackInputs'),
]
_test_pipeline = [dict(type='LoadImageFromFile'), dict(type='PackInputs')]
_folder = dict(_delete_=True, type='mmpretrain.CustomDataset', data_root='data/cifar10', with_label=True)
train_dataloader = dict(dataset=dict(**_folder, data_prefix='train', pipeline=_train_pipeline))
val_dataloader = dict(dataset=dict(**_folder, data_prefix='test', pipeline=_test_pipeline))
test_dataloader = dict(dataset=dict(**_folder, data_prefix='test', pipeline=_test_pipeline))
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-3, by_epoch=False, end=200),
    dict(type='CosineAnnealingLR', eta_min=1e-5, by_epoch=True, end=4, convert_to_iter_based=True),
]
train_cfg = dict(max_epochs=4)
default_hooks = dict(logger=dict(interval=20), checkpoint=dict(interval=1))
randomness = dict(seed=0)
