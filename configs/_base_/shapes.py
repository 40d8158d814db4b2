# Generated images with boxes and masks, which need no download. This command generates them:
#     python tools/dataset_converters/make_shapes.py
_base_ = ['mmdet::_base_/datasets/coco_instance.py']
data_root = 'data/shapes/'
metainfo = dict(
    classes=('checked', 'cross', 'ring', 'striped', 'triangle'),
    palette=[(230, 60, 60), (60, 160, 240), (250, 190, 40), (60, 190, 90), (190, 90, 220)],
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
# Batches are small because short training from scratch needs many iterations. With fewer, results depend on the seed.
# Loading images of this size is faster than transferring them from a worker process.
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
