_base_ = '../_base_/t2t-vit_8xb64_in1k.py'
model = dict(backbone=dict(norm_cfg=dict(type='DTN')))
