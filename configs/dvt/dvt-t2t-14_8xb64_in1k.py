_base_ = '../_base_/dvt_8xb128_in1k.py'
model = dict(arch='t2t-14')
train_dataloader = dict(batch_size=64)
optim_wrapper = dict(optimizer=dict(lr=5e-4, weight_decay=0.05))
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-6 / 5e-4, by_epoch=True, end=21),
    dict(type='CosineAnnealingLR', eta_min=1e-5, by_epoch=True, end=300),
]
auto_scale_lr = dict(base_batch_size=512)
