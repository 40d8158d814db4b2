_base_ = 'mmdet::swin/mask-rcnn_swin-t-p4-w7_fpn_ms-crop-3x_coco.py'
custom_imports = dict(imports=['mmdtn'])
model = dict(backbone=dict(_delete_=True, type='SwinDTN'))
