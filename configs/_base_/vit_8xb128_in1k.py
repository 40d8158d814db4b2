_base_ = './deit_8xb128_in1k.py'
model = dict(
    backbone=dict(type='ViTDTN', arch='s*'),
    head=dict(in_channels=432),
)
# DeiT's and the DTN authors' moving average of the weights, 0.99996 of it kept in each step. PVT's recipe has none.
custom_hooks = [dict(type='EMAHook', momentum=4e-5, priority='ABOVE_NORMAL'), *_base_.custom_hooks]
