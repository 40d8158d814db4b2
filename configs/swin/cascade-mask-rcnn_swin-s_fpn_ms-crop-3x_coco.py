_base_ = ['../_base_/cascade-mask-rcnn_swin_ms-crop-3x_coco.py', '../_base_/backbones/swin-s.py']
model = dict(backbone=_base_.ln)
