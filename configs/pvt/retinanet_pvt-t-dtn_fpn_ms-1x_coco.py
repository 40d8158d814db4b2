_base_ = ['./retinanet_pvt-t-dtn_fpn_1x_coco.py', '../_base_/ms_480-800.py']
train_dataloader = dict(dataset=dict(pipeline=_base_.ms_boxes))
