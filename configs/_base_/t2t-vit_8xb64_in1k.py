# T2T-ViT's published recipe as MMPretrain has it, for 8 GPUs with 64 images each: AdamW, 10 epochs of warm-up, a cosine
# to epoch 300, 10 epochs at a tenth, a moving average of the weights.
_base_ = ['mmpretrain::t2t_vit/t2t-vit-t-14_8xb64_in1k.py', './no_decay.py']
custom_imports = dict(imports=['mmdtn'])
model = dict(backbone=dict(_delete_=True, type='T2TViTDTN', arch='t-14'))
optim_wrapper = dict(
    paramwise_cfg=dict(_delete_=True, bias_decay_mult=0.0, flat_decay_mult=0.0, **_base_.no_decay),
)
