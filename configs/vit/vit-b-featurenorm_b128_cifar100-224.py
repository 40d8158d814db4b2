_base_ = './vit-b_b128_cifar100-224.py'
model = dict(backbone=dict(norm_cfg=dict(type='FeatureNorm')))
