_base_ = '../_base_/swin_8xb128_in1k.py'
model = dict(backbone=dict(arch='small', norm_cfg=dict(type='LN')))
