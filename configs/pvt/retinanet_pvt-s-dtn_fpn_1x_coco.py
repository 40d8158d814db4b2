_base_ = ['../_base_/retinanet_pvt_1x_coco.py', '../_base_/backbones/pvt-s.py']
model = dict(backbone=_base_.dtn)
