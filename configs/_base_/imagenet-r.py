# Tests an ImageNet classifier on ImageNet-R, which has 30,000 renditions of 200 classes in class folders. Inherit this
# file together with a classifier's config, and replace its test set:
#     _base_ = ['../vit/vit-s-star-dtn_8xb128_in1k.py', '../_base_/imagenet-r.py']
#     test_dataloader = dict(_delete_=True, **_base_.imagenet_r.dataloader)
#     test_evaluator = dict(_delete_=True, **_base_.imagenet_r.evaluator)
imagenet_r = dict(
    dataloader=dict(
        batch_size=64,
        num_workers=5,
        # MMPretrain's ImageNet dataset needs 1000 folders.
        dataset=dict(
            type='CustomDataset',
            data_root='data/imagenet-r',
            pipeline=[
                dict(type='LoadImageFromFile'),
                dict(type='ResizeEdge', scale=256, edge='short', backend='pillow', interpolation='bicubic'),
                dict(type='CenterCrop', crop_size=224),
                dict(type='PackInputs'),
            ],
        ),
        sampler=dict(type='DefaultSampler', shuffle=False),
    ),
    evaluator=dict(type='SubsetAccuracy'),
)
