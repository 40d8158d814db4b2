_base_ = '../_base_/vit_8xb128_in1k.py'
model = dict(backbone=dict(arch='t', norm_cfg=dict(type='LN')), head=dict(in_channels=192))
