# Table 10a: DTN without relative position, so that P is the mean over all tokens.
_base_ = './pvt-t-dtn_8xb128_in1k.py'
model = dict(backbone=dict(norm_cfg=dict(position='uniform')))
