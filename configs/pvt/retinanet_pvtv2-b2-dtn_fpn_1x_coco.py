_base_ = ['../_base_/retinanet_pvt_1x_coco.py', '../_base_/backbones/pvtv2-b2.py']
model = dict(backbone=_base_.dtn)
