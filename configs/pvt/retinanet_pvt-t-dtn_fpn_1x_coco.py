_base_ = ['../_base_/retinanet_pvt_1x_coco.py', '../_base_/backbones/pvt-t.py']
model = dict(backbone=_base_.dtn)
