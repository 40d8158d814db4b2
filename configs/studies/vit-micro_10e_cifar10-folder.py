# The model of vit-micro_cifar10-folder.py, trained for ten epochs. A run takes 25 minutes on one core.
_base_ = './vit-micro_cifar10-folder.py'
max_iters = 3910
train_cfg = dict(max_iters=max_iters, val_interval=782)
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-3, by_epoch=False, end=200),
    dict(type='CosineAnnealingLR', eta_min=1e-5, by_epoch=False, T_max=max_iters),
]
default_hooks = dict(logger=dict(interval=50), checkpoint=dict(interval=782))
