_base_ = ['../_base_/mask2former_swin_8xb2-lsj-50e_coco-panoptic.py', '../_base_/backbones/swin-t.py']
model = dict(backbone=_base_.dtn)
