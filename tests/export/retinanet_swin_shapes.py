_base_ = './retinanet_pvt_shapes.py'
widths = [32, 64, 128, 256]
model = dict(
    backbone=dict(
        _delete_=True,
        type='SwinDTN',
        arch=dict(base='tiny', width=32, depths=(1, 1, 2, 2), num_heads=(1, 2, 4, 8), drop_path_rate=0.0),
        norm_cfg=dict(type='DTN'),
        init_cfg=dict(type='Xavier', layer='Linear', distribution='uniform'),
    ),
    neck=dict(in_channels=widths),
)
