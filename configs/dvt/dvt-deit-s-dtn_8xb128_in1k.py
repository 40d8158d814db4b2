# DTN in the first 10 of 12 blocks of each exit. This model is in neither paper.
_base_ = './dvt-deit-s_8xb128_in1k.py'
model = dict(norm_cfg=dict(type='DTN'), dtn_layers=10)
