_base_ = ['../_base_/mask2former_swin_8xb2-lsj-50e_coco.py', '../_base_/backbones/swin-s.py']
model = dict(backbone=_base_.dtn)
