# Tests an ImageNet classifier on one cell of ImageNet-C, whose images already have 224 pixels. Inherit this file
# together with a classifier's config, and replace its test set:
#     _base_ = ['../vit/vit-s-star-dtn_8xb128_in1k.py', '../_base_/imagenet-c.py']
#     test_dataloader = dict(_delete_=True, **_base_.imagenet_c.dataloader)
#     test_evaluator = dict(_delete_=True, **_base_.imagenet_c.evaluator)
# To test another cell, add --cfg-options test_dataloader.dataset.data_prefix=fog/3. To test all cells, run
# test_robustness.py --stored.
imagenet_c = dict(
    dataloader=dict(
        batch_size=64,
        num_workers=5,
        dataset=dict(
            type='ImageNet',
            data_root='data/imagenet-c',
            data_prefix='gaussian_noise/1',
            split='',
            pipeline=[dict(type='LoadImageFromFile'), dict(type='PackInputs')],
        ),
        sampler=dict(type='DefaultSampler', shuffle=False),
    ),
    evaluator=dict(type='Accuracy', topk=(1, 5)),
)
