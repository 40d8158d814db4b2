_base_ = '../_base_/pvt_8xb128_in1k.py'
model = dict(backbone=dict(arch='large', norm_cfg=dict(type='LN')))
