_base_ = '../_base_/levit_8xb256_in1k.py'
model = dict(backbone=dict(arch='128s', norm_cfg=None))
