# T2T-ViT's published recipe as in MMPretrain, for 8 GPUs with 64 images each. The recipe uses AdamW and a moving
# average of the weights. The learning rate warms up for 10 epochs, follows a cosine schedule until epoch 300, and stays
# at a tenth of the last value for 10 epochs.
_base_ = ['mmpretrain::t2t_vit/t2t-vit-t-14_8xb64_in1k.py', './no_decay.py', './runtime.py']
custom_imports = _base_.runtime.custom_imports
train_cfg = dict(_delete_=True, **_base_.runtime.train_cfg, max_epochs=310, val_interval=1)  # removes by_epoch
default_hooks = _base_.runtime.default_hooks
custom_hooks = [*_base_.custom_hooks, *_base_.runtime.custom_hooks]
visualizer = _base_.runtime.visualizer
model = dict(backbone=dict(_delete_=True, type='T2TViTDTN', arch='t-14'))
optim_wrapper = dict(
    paramwise_cfg=dict(_delete_=True, bias_decay_mult=0.0, flat_decay_mult=0.0, **_base_.no_decay),
)
