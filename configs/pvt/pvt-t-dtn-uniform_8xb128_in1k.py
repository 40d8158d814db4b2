# Table 10a of the paper: DTN without relative position. P averages over all tokens.
_base_ = './pvt-t-dtn_8xb128_in1k.py'
model = dict(backbone=dict(norm_cfg=dict(position='uniform')))
