_base_ = './vit-mini_b128_cifar100.py'
model = dict(backbone=dict(norm_cfg=dict(type='FeatureNorm')))
