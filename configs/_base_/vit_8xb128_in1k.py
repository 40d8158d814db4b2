_base_ = './deit_8xb128_in1k.py'
model = dict(
    backbone=dict(type='ViTDTN', arch='s*'),
    head=dict(in_channels=432),
)
# DeiT and DTN's authors use a moving average of the weights with a decay of 0.99996. PVT's recipe has no average.
custom_hooks = [dict(type='EMAHook', momentum=4e-5, priority='ABOVE_NORMAL'), *_base_.custom_hooks]
