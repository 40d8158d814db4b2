_base_ = './deit_8xb128_in1k.py'
model = dict(
    backbone=dict(type='ViTDTN', arch='s*'),
    head=dict(in_channels=432),
)
