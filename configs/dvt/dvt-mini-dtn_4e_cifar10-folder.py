_base_ = './dvt-mini_4e_cifar10-folder.py'
model = dict(norm_cfg=dict(type='DTN'), dtn_layers=3)
