# DTN in the first 10 of 12 blocks of each exit, with this project's rules for weight decay. This model is in neither
# paper.
_base_ = './dvt-t2t-12_8xb128_in1k.py'
model = dict(norm_cfg=dict(type='DTN'), dtn_layers=10)
optim_wrapper = dict(paramwise_cfg=_base_.no_decay)
