_base_ = './dino_vit-mini_cifar10.py'
model = dict(backbone=dict(norm_cfg=dict(type='DTN')))
