# A small Mask R-CNN with DTN, which trains from scratch on generated images in minutes on two CPU cores. For training,
# run `make demo` or these commands:
#     python tools/dataset_converters/make_shapes.py
#     tools/dist_train.sh configs/demo/mask-rcnn_pvt-dtn_shapes.py 2
_base_ = [
    'mmdet::_base_/models/mask-rcnn_r50_fpn.py',
    '../_base_/shapes.py',
    '../_base_/mmdet_runtime.py',
    '../_base_/no_decay.py',
]

max_epochs = 7
widths = [32, 64, 128, 160]

model = dict(
    data_preprocessor=dict(pad_size_divisor=8),
    backbone=dict(
        _delete_=True,
        type='PVTDTN',
        arch=dict(
            base='b0',
            depths=(2, 2, 2, 1),
            widths=widths,
            mlp_ratios=(4, 4, 4, 4),
            num_heads=(1, 2, 4, 5),
            norm_heads=(4, 4, 4, 4),
            drop_path_rate=0.0,
        ),
        norm_cfg=dict(type='DTN'),
        # The usual initialisation, with a standard deviation of 0.02, is meant for wider layers. Here, it would double
        # the number of epochs needed.
        init_cfg=dict(type='Xavier', layer='Linear', distribution='uniform'),
    ),
    # An FPN without norms learns slowly from scratch, and batches are too small for batch normalisation. Groups of one
    # channel remove the mean of each channel over the image. In larger groups, these means remain. Because the means
    # are equal for all boxes, they hide the differences between boxes for a time that depends on the seed
    # (docs/evidence.md).
    neck=dict(in_channels=widths, out_channels=64, num_outs=4, norm_cfg=dict(type='GN', num_groups=64)),
    rpn_head=dict(in_channels=64, feat_channels=64, anchor_generator=dict(scales=[4], strides=[4, 8, 16, 32])),
    # The heads predict one box and one mask per region for all classes, so their few weights learn from all objects.
    roi_head=dict(
        bbox_roi_extractor=dict(out_channels=64, finest_scale=32),
        bbox_head=dict(in_channels=64, fc_out_channels=256, num_classes=5, reg_class_agnostic=True),
        mask_roi_extractor=dict(out_channels=64, finest_scale=32),
        mask_head=dict(in_channels=64, conv_out_channels=32, num_convs=2, num_classes=5, class_agnostic=True),
    ),
    train_cfg=dict(
        rpn=dict(sampler=dict(num=128)),
        rpn_proposal=dict(nms_pre=150, max_per_img=80),
        rcnn=dict(sampler=dict(num=40, pos_fraction=0.4)),
    ),
    test_cfg=dict(rpn=dict(nms_pre=300, max_per_img=150)),
)

train_cfg = dict(**_base_.runtime.train_cfg, max_epochs=max_epochs, val_interval=max_epochs)
val_cfg = dict(type='ValLoop')
test_cfg = dict(type='TestLoop')
optim_wrapper = dict(
    type='OptimWrapper',
    optimizer=dict(type='AdamW', lr=1.0e-3, weight_decay=0.05, fused=True),
    # One step of AdamW changes each weight by about the learning rate. Such steps are too large for the first layer of
    # the box head, which has 3136 inputs of the same sign: some of its units became zero for all boxes and never
    # recovered.
    paramwise_cfg=dict(custom_keys=dict(shared_fcs=dict(lr_mult=0.1), **_base_.no_decay.custom_keys)),
    clip_grad=dict(max_norm=5.0),
)
param_scheduler = [
    dict(type='LinearLR', start_factor=0.01, by_epoch=False, end=300),
    dict(type='CosineAnnealingLR', eta_min_ratio=0.01, T_max=max_epochs, by_epoch=True, convert_to_iter_based=True),
]
visualizer = dict(line_width=1, alpha=0.5)
default_hooks = dict(checkpoint=dict(max_keep_ckpts=1))
randomness = dict(seed=0)
