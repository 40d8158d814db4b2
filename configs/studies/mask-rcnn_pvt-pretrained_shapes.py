# The study's Mask R-CNN, from the weights of pvt_cifar10-folder.py in place of the start.
_base_ = './mask-rcnn_pvt_shapes.py'
_checkpoint = 'work_dirs/pvt_cifar10-folder/iter_522.pth'
model = dict(backbone=dict(init_cfg=dict(_delete_=True, type='Pretrained', checkpoint=_checkpoint, prefix='backbone.')))
