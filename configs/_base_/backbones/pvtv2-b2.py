# PVTv2-B2 with LayerNorm, or with DTN through a warm start. Both variants start from the published ImageNet weights.
_file = 'https://github.com/whai362/PVT/releases/download/v2/pvt_v2_b2.pth'
ln = dict(
    type='PVTDTN',
    arch='b2',
    norm_cfg=dict(type='LN'),
    init_cfg=dict(type='Pretrained', checkpoint=_file),
)
dtn = dict(
    type='PVTDTN',
    arch=dict(base='b2', num_heads=(1, 2, 5, 8), norm_heads=(4, 4, 5, 8)),
    norm_cfg=dict(type='DTN', prenorm=False, eps=1e-6),
    init_cfg=dict(type='Pretrained', checkpoint=_file, warm_start=0.999),
)
