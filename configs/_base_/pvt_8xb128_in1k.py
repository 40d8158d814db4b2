_base_ = './deit_8xb128_in1k.py'
model = dict(
    backbone=dict(type='PVTDTN', arch='tiny', out_type='cls_token'),
    head=dict(in_channels=512),
)
