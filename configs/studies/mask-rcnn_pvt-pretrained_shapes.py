# The demo's Mask R-CNN with LayerNorm. It starts from the weights of pvt_cifar10-folder.py and uses the training
# settings of the study demo.py.
_base_ = '../demo/mask-rcnn_pvt-dtn_shapes.py'
_checkpoint = 'work_dirs/pvt_cifar10-folder/iter_3910.pth'
model = dict(
    backbone=dict(
        norm_cfg=dict(type='LN'),
        init_cfg=dict(_delete_=True, type='Pretrained', checkpoint=_checkpoint, prefix='backbone.'),
    )
)
train_dataloader = dict(batch_size=4)
train_cfg = dict(val_interval=3)
