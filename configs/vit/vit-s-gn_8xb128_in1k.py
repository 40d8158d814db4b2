# Table 3 of the paper: a different normaliser instead of DTN.
_base_ = './vit-s_8xb128_in1k.py'
model = dict(
    backbone=dict(norm_cfg=dict(type='GN'), cls_from=10, other_norm_cfg=dict(type='LN', eps=1e-5)),
)
