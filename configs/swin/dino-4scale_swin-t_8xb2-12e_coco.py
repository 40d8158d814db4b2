_base_ = ['../_base_/dino-4scale_swin_8xb2-12e_coco.py', '../_base_/backbones/swin-t.py']
model = dict(backbone=_base_.ln)
