_base_ = '../_base_/listops.py'
model = dict(attention=dict(type='BigBirdAttention'))
