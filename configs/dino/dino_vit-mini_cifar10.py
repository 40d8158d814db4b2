# DINO with a ViT of 4 blocks for CIFAR-10 in class folders. Two CPU cores are enough.
_base_ = '../_base_/dino.py'
model = dict(
    backbone=dict(
        arch=dict(width=64, depth=4, num_heads=4, mlp_ratio=4),
        dtn_layers=3,
        cls_from=3,
        img_size=32,
        patch_size=4,
        drop_path_rate=0.0,
        norm_cfg=dict(type='LN'),
        # With the usual standard deviation of 0.02, the features of such a narrow model hardly depend on the image, and
        # DINO collapses.
        init_cfg=[dict(type='Xavier', layer='Linear', distribution='uniform')],
    ),
    head=dict(in_channels=64, hidden_channels=256, bottleneck_channels=64, out_channels=512),
    teacher_momentum=0.95,
)
data_preprocessor = dict(
    type='SelfSupDataPreprocessor', mean=[125.307, 122.961, 113.8575], std=[51.5865, 50.847, 51.255], to_rgb=True
)
_global_crop = dict(type='torchvision/RandomResizedCrop', size=32, scale=(0.4, 1.0), interpolation='bicubic')
_local_crop = dict(type='torchvision/RandomResizedCrop', size=16, scale=(0.1, 0.4), interpolation='bicubic')
_views = [
    [_global_crop, *_base_.colours],
    [_global_crop, *_base_.colours, dict(type='Solarize', thr=128, prob=0.2)],
    [_local_crop, *_base_.colours],
]
_train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='NumpyToPIL', to_rgb=True),
    dict(type='MultiView', num_views=[1, 1, 2], transforms=_views),
    dict(type='PackInputs'),
]
_test_pipeline = [dict(type='LoadImageFromFile'), dict(type='PackInputs')]
_loader = dict(num_workers=0, collate_fn=dict(type='default_collate'))
_in_order = dict(type='DefaultSampler', shuffle=False)
_folder = dict(type='CustomDataset', data_root='data/cifar10', with_label=True)
train_dataloader = dict(
    **_loader,
    batch_size=64,
    drop_last=True,
    sampler=dict(type='DefaultSampler', shuffle=True),
    dataset=dict(**_folder, data_prefix='train', pipeline=_train_pipeline),
)
val_dataloader = dict(
    **_loader,
    batch_size=250,
    sampler=_in_order,
    dataset=dict(**_folder, data_prefix='test', pipeline=_test_pipeline),
)
_bank = dict(val_dataloader, dataset=dict(**_folder, data_prefix='train', pipeline=_test_pipeline))
val_cfg = dict(type='KNNLoop', bank=_bank, ks=(20,))
val_evaluator = []
test_dataloader = val_dataloader
test_cfg = dict(val_cfg, stage='test')
test_evaluator = []
optim_wrapper = dict(optimizer=dict(fused=True))
_steps = 1000
train_cfg = dict(**_base_.runtime.train_cfg, max_iters=_steps, val_interval=500)
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-3, by_epoch=False, end=30),
    dict(type='CosineAnnealingLR', eta_min=1e-5, by_epoch=False, begin=30),
    dict(type='CosineAnnealingWeightDecay', eta_min=0.4, by_epoch=False),
]
log_processor = dict(by_epoch=False)
default_hooks = dict(
    logger=dict(interval=20, log_metric_by_epoch=False), checkpoint=dict(by_epoch=False, interval=250, max_keep_ckpts=1)
)
custom_hooks = [dict(type='DINOHook', frozen_last_layer=0), *_base_.custom_hooks[1:]]
randomness = dict(seed=0)
