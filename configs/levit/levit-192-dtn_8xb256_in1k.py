_base_ = '../_base_/levit_8xb256_in1k.py'
model = dict(backbone=dict(arch='192', norm_cfg=dict(type='DTN')))
