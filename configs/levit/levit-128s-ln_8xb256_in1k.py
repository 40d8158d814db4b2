# Control experiment that is not in the paper: LayerNorm instead of the DTN in levit-128s-dtn.
_base_ = '../_base_/levit_8xb256_in1k.py'
model = dict(backbone=dict(arch='128s', norm_cfg=dict(type='LN')))
