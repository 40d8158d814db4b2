_base_ = './vit-b_b128_cifar10-224.py'
model = dict(backbone=dict(norm_cfg=dict(type='UN')))
