# Tapers over 240 of 300 epochs, the share of the published runs.
_base_ = './vit-mini_b128_cifar100.py'
model = dict(backbone=dict(norm_cfg=dict(type='PRepBN', taper_iters=93_800)))
