# A small Mask R-CNN with DTN, from scratch, on generated pictures: minutes on two CPU cores. `make demo` runs it, or
#     python tools/dataset_converters/make_shapes.py
#     tools/dist_train.sh configs/demo/mask-rcnn_pvt-dtn_shapes.py 2
_base_ = [
    'mmdet::_base_/models/mask-rcnn_r50_fpn.py',
    'mmdet::_base_/datasets/coco_instance.py',
    'mmdet::_base_/default_runtime.py',
    '../_base_/no_decay.py',
]
custom_imports = dict(imports=['mmdtn'])

data_root = 'data/shapes/'
metainfo = dict(
    classes=('checked', 'cross', 'ring', 'striped', 'triangle'),
    palette=[(230, 60, 60), (60, 160, 240), (250, 190, 40), (60, 190, 90), (190, 90, 220)],
)
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
        # The usual start, a standard deviation of 0.02, is meant for wider layers: here it doubles the epochs needed.
        init_cfg=dict(type='Xavier', layer='Linear', distribution='uniform'),
    ),
    # From scratch, an FPN without norms learns slowly, and batch normalisation sees too few pictures at a time.
    neck=dict(in_channels=widths, out_channels=64, num_outs=4, norm_cfg=dict(type='GN', num_groups=8)),
    rpn_head=dict(in_channels=64, feat_channels=64, anchor_generator=dict(scales=[4], strides=[4, 8, 16, 32])),
    # Boxes and masks do not depend on the class, so that each of their few weights learns from all objects.
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

resize = dict(type='Resize', scale=(160, 160), keep_ratio=True)
train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations', with_bbox=True, with_mask=True),
    resize,
    dict(type='RandomFlip', prob=[0.25, 0.25, 0.25], direction=['horizontal', 'vertical', 'diagonal']),
    dict(type='PackDetInputs'),
]
test_pipeline = [
    dict(type='LoadImageFromFile'),
    resize,
    dict(type='LoadAnnotations', with_bbox=True, with_mask=True),
    dict(type='PackDetInputs', meta_keys=('img_id', 'img_path', 'ori_shape', 'img_shape', 'scale_factor')),
]
# Small batches: in few minutes, from scratch, the number of steps counts, or else success depends on the seed.
# Pictures this small are read faster than a second process hands them over.
loader = dict(batch_size=2, num_workers=0, persistent_workers=False)
pictures = dict(data_root=data_root, metainfo=metainfo)
train_dataloader = dict(
    **loader,
    dataset=dict(
        **pictures,
        ann_file='annotations/instances_train.json',
        data_prefix=dict(img='train/'),
        pipeline=train_pipeline,
    ),
)
val_dataloader = dict(
    **loader,
    dataset=dict(
        **pictures,
        ann_file='annotations/instances_val.json',
        data_prefix=dict(img='val/'),
        pipeline=test_pipeline,
    ),
)
test_dataloader = val_dataloader
val_evaluator = dict(ann_file=data_root + 'annotations/instances_val.json')
test_evaluator = val_evaluator

train_cfg = dict(type='EpochBasedTrainLoop', max_epochs=max_epochs, val_interval=max_epochs)
val_cfg = dict(type='ValLoop')
test_cfg = dict(type='TestLoop')
optim_wrapper = dict(
    type='OptimWrapper',
    optimizer=dict(type='AdamW', lr=1.0e-3, weight_decay=0.05, fused=True),
    paramwise_cfg=_base_.no_decay,
    clip_grad=dict(max_norm=5.0),
)
param_scheduler = [
    dict(type='LinearLR', start_factor=0.01, by_epoch=False, end=300),
    dict(type='CosineAnnealingLR', eta_min_ratio=0.01, T_max=max_epochs, by_epoch=True, convert_to_iter_based=True),
]
visualizer = dict(line_width=1, alpha=0.5)
default_hooks = dict(checkpoint=dict(max_keep_ckpts=1))
randomness = dict(seed=0)
