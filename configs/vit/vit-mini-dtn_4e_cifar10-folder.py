_base_ = './vit-mini_4e_cifar10-folder.py'
model = dict(backbone=dict(norm_cfg=dict(type='DTN')))
