# The DVT authors' recipe for T2T-ViT-12, on 8 GPUs with 128 images each.
_base_ = [
    'mmpretrain::_base_/datasets/imagenet_bs64_swin_224.py',
    './mmpretrain_runtime.py',
    './no_decay.py',
]
model = dict(
    type='DVT',
    arch='t2t-12',
    loss=dict(type='mmpretrain.LabelSmoothLoss', label_smooth_val=0.1, mode='original'),
    train_cfg=dict(augments=[dict(type='Mixup', alpha=0.8), dict(type='CutMix', alpha=1.0)]),
)
_load, _crop, *_rest = _base_.train_pipeline
_either = [[dict(_crop, interpolation=kind)] for kind in ('bilinear', 'bicubic')]
train_dataloader = dict(
    batch_size=128, dataset=dict(pipeline=[_load, dict(type='RandomChoice', transforms=_either), *_rest])
)
val_evaluator = dict(_delete_=True, type='ExitAccuracy')
test_evaluator = dict(_delete_=True, type='ExitAccuracy')
# tools/dvt_budget.py finds thresholds on these training images, which are cropped as in the authors' code.
calibration_dataloader = dict(
    batch_size=128,
    num_workers=5,
    dataset=dict(
        type='ImageNet',
        data_root='data/imagenet',
        split='train',
        pipeline=[_load, _crop, dict(type='RandomFlip', prob=0.5), dict(type='PackInputs')],
    ),
    sampler=dict(type='DefaultSampler', shuffle=False),
)
# As in the published runs, parameters with one dimension have no weight decay. Unlike in _base_.no_decay, the class
# token has weight decay.
optim_wrapper = dict(
    optimizer=dict(type='AdamW', lr=2e-3, weight_decay=0.03),
    paramwise_cfg=dict(bias_decay_mult=0.0, flat_decay_mult=0.0),
)
# The learning rate changes once per epoch. The cosine schedule starts at epoch 0, not at the end of the warm-up. Ten
# epochs at 1e-5 follow.
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-6 / 2e-3, by_epoch=True, end=21),
    dict(type='CosineAnnealingLR', eta_min=1e-5, by_epoch=True, end=300),
]
train_cfg = dict(**_base_.runtime.train_cfg, max_epochs=310, val_interval=1)
val_cfg = dict()
test_cfg = dict()
# A moving average of the weights, with a decay of 0.99996, is validated and saved.
custom_hooks = [dict(type='EMAHook', momentum=4e-5, priority='ABOVE_NORMAL'), *_base_.custom_hooks]
default_hooks = dict(checkpoint=dict(max_keep_ckpts=3, save_best='accuracy/top1'))
auto_scale_lr = dict(base_batch_size=1024)
