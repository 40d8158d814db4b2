_base_ = './deit_8xb128_in1k.py'
model = dict(
    backbone=dict(type='SwinDTN', arch='tiny', out_type='avg_featmap'),
    head=dict(in_channels=768),
)
# Swin's recipe differs from DeiT's in three ways: no repeated augmentation, gradient clipping, and a longer warm-up.
train_dataloader = dict(sampler=dict(type='DefaultSampler'))
optim_wrapper = dict(clip_grad=dict(max_norm=5.0))
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-3, by_epoch=True, end=20, convert_to_iter_based=True),
    dict(type='CosineAnnealingLR', eta_min=1e-5, by_epoch=True, begin=20),
]
