# Small RetinaNet for test_trained.py. It trains from scratch on generated images within minutes on one core.
_base_ = [
    'mmdet::_base_/models/retinanet_r50_fpn.py',
    '../../configs/_base_/shapes.py',
    'mmdet::_base_/default_runtime.py',
    '../../configs/_base_/no_decay.py',
]
custom_imports = dict(imports=['mmdtn'])
widths = [32, 64, 128, 160]
max_iters = 1000

model = dict(
    backbone=dict(
        _delete_=True,
        type='PVTDTN',
        arch=dict(
            base='b0',
            depths=(1, 1, 2, 1),
            widths=widths,
            mlp_ratios=(4, 4, 4, 4),
            num_heads=(1, 2, 4, 5),
            norm_heads=(4, 4, 4, 4),
            drop_path_rate=0.0,
        ),
        norm_cfg=dict(type='DTN'),
        init_cfg=dict(type='Xavier', layer='Linear', distribution='uniform'),
    ),
    neck=dict(in_channels=widths, out_channels=64, norm_cfg=dict(type='GN', num_groups=64)),
    bbox_head=dict(
        num_classes=5, in_channels=64, feat_channels=64, stacked_convs=2, norm_cfg=dict(type='GN', num_groups=16)
    ),
)
resize = dict(type='Resize', scale=(192, 192), keep_ratio=True)
train_pipeline = [resize if step.type == 'Resize' else step for step in _base_.train_pipeline]
test_pipeline = [resize if step.type == 'Resize' else step for step in _base_.test_pipeline]
train_dataloader = dict(
    sampler=dict(_delete_=True, type='InfiniteSampler', shuffle=True), dataset=dict(pipeline=train_pipeline)
)
test_dataloader = dict(batch_size=1, dataset=dict(pipeline=test_pipeline))
test_evaluator = dict(metric='bbox')
val_dataloader = val_evaluator = None

train_cfg = dict(type='IterBasedTrainLoop', max_iters=max_iters, val_interval=10**6)
test_cfg = dict(type='TestLoop')
optim_wrapper = dict(
    type='OptimWrapper',
    optimizer=dict(type='AdamW', lr=1.0e-3, weight_decay=0.05, fused=True),
    paramwise_cfg=_base_.no_decay,
    clip_grad=dict(max_norm=5.0),
)
param_scheduler = [
    dict(type='LinearLR', start_factor=0.01, by_epoch=False, end=200),
    dict(type='CosineAnnealingLR', eta_min_ratio=0.01, T_max=max_iters, by_epoch=False),
]
log_processor = dict(by_epoch=False)
default_hooks = dict(checkpoint=dict(by_epoch=False, interval=500, max_keep_ckpts=1))
randomness = dict(seed=0)
