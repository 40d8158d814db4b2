# From ImageNet weights with LayerNorm, which DTN keeps at first. Give swin_tiny_patch4_window7_224.pth of
# github.com/microsoft/Swin-Transformer:
#     --cfg-options model.backbone.init_cfg.checkpoint=swin_tiny_patch4_window7_224.pth
_base_ = './mask-rcnn_swin-t-dtn_fpn_1x_coco.py'
model = dict(
    backbone=dict(
        norm_cfg=dict(type='DTN', prenorm=False),
        init_cfg=dict(
            _delete_=True,
            type='Pretrained',
            checkpoint='pretrained/swin_tiny_patch4_window7_224.pth',
            warm_start=0.999,
        ),
    )
)
