# From ImageNet weights with LayerNorm, which DTN keeps at first. Give the classifier pvt_tiny.pth of
# github.com/whai362/PVT:
#     --cfg-options model.backbone.init_cfg.checkpoint=pvt_tiny.pth
_base_ = './retinanet_pvt-t-dtn_fpn_1x_coco.py'
model = dict(
    backbone=dict(
        arch=dict(_delete_=True, base='tiny', num_heads=(1, 2, 5, 8), norm_heads=(4, 4, 5, 8)),
        norm_cfg=dict(type='DTN', prenorm=False, eps=1e-6),
        init_cfg=dict(_delete_=True, type='Pretrained', checkpoint='pretrained/pvt_tiny.pth', warm_start=0.999),
    )
)
