_base_ = ['../_base_/retinanet_pvt_1x_coco.py', '../_base_/backbones/pvtv2-b0.py']
model = dict(backbone=_base_.ln, neck=dict(in_channels=[32, 64, 160, 256]))
