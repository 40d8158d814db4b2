# DVT's authors published no recipe for DeiT. This config uses the recipe of DeiT without distillation.
_base_ = '../_base_/dvt_8xb128_in1k.py'
model = dict(arch='deit-s')
train_dataloader = dict(sampler=dict(type='RepeatAugSampler'))
optim_wrapper = dict(optimizer=dict(lr=1e-3, weight_decay=0.05), paramwise_cfg=_base_.no_decay)
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-6 / 1e-3, by_epoch=True, end=6),
    dict(type='CosineAnnealingLR', eta_min=1e-5, by_epoch=True, end=300),
]
train_cfg = dict(max_epochs=300)
