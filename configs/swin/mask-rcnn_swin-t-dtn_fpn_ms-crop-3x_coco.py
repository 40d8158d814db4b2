_base_ = ['../_base_/mask-rcnn_swin_ms-crop-3x_coco.py', '../_base_/backbones/swin-t.py']
model = dict(backbone=_base_.dtn)
