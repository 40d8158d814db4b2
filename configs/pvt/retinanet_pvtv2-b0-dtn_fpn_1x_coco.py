_base_ = '../_base_/retinanet_pvt_1x_coco.py'
model = dict(
    backbone=dict(
        arch='b0',
        norm_cfg=dict(type='DTN'),
        init_cfg=dict(
            type='Pretrained', checkpoint='work_dirs/pvtv2-b0-dtn_8xb128_in1k/epoch_300.pth', prefix='backbone.'
        ),
    ),
    neck=dict(in_channels=[32, 64, 160, 256]),
)
