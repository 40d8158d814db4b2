_base_ = '../_base_/retinanet_pvt_1x_coco.py'
model = dict(
    backbone=dict(
        arch='b2',
        norm_cfg=dict(type='DTN'),
        init_cfg=dict(
            type='Pretrained', checkpoint='work_dirs/pvtv2-b2-dtn_8xb128_in1k/epoch_300.pth', prefix='backbone.'
        ),
    ),
)
