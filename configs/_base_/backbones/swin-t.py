# Swin-T with LayerNorm, or with DTN through a warm start. Both variants start from the published ImageNet weights.
_file = 'https://github.com/SwinTransformer/storage/releases/download/v1.0.0/swin_tiny_patch4_window7_224.pth'
ln = dict(
    type='SwinDTN',
    arch='tiny',
    norm_cfg=dict(type='LN'),
    init_cfg=dict(type='Pretrained', checkpoint=_file),
)
dtn = dict(
    type='SwinDTN',
    arch='tiny',
    norm_cfg=dict(type='DTN', prenorm=False),
    init_cfg=dict(type='Pretrained', checkpoint=_file, warm_start=0.999),
)
