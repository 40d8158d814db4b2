# The published model of DINO, which has LayerNorm.
_base_ = '../_base_/dino_8xb64-100e_in1k.py'
model = dict(backbone=dict(arch='s', norm_cfg=dict(type='LN')), head=dict(in_channels=384))
