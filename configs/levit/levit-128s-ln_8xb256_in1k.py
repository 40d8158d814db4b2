# The control that the paper lacks: LayerNorm where levit-128s-dtn has DTN.
_base_ = '../_base_/levit_8xb256_in1k.py'
model = dict(backbone=dict(arch='128s', norm_cfg=dict(type='LN')))
