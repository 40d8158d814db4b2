_base_ = './transformer-ln_b32-5k_listops.py'
model = dict(norm_cfg=dict(type='DTN'))
