_base_ = '../_base_/linear_8xb128-100e_in1k.py'
_pretrained = dict(
    type='Pretrained',
    checkpoint='work_dirs/dino_vit-s_8xb64-100e_in1k/epoch_100.pth',
    prefix='teacher.module.backbone.',
)
model = dict(backbone=dict(arch='s', norm_cfg=dict(type='LN'), init_cfg=_pretrained))
