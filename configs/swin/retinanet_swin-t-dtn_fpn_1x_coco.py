_base_ = ['../_base_/retinanet_swin_1x_coco.py', '../_base_/backbones/swin-t.py']
model = dict(backbone=_base_.dtn)
