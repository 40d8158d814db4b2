# As in the paper, the ImageNet training also uses DTN. First train pvt/pvt-t-dtn_8xb128_in1k.py.
_base_ = '../_base_/mask-rcnn_pvt_1x_coco.py'
model = dict(
    backbone=dict(
        arch='tiny',
        norm_cfg=dict(type='DTN'),
        init_cfg=dict(
            type='Pretrained', checkpoint='work_dirs/pvt-t-dtn_8xb128_in1k/epoch_300.pth', prefix='backbone.'
        ),
    ),
)
