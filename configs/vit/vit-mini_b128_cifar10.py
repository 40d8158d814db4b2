_base_ = ['../_base_/vit-mini_cifar.py', 'mmpretrain::_base_/datasets/cifar10_bs16.py']
model = dict(backbone=dict(norm_cfg=dict(type='LN'), cls_from=5))  # only the normaliser differs from the DTN config
train_dataloader = dict(batch_size=128, dataset=dict(pipeline=_base_.train_transforms))
val_dataloader = dict(batch_size=256)
test_dataloader = dict(batch_size=256)
val_evaluator = dict(topk=(1, 5))
test_evaluator = dict(topk=(1, 5))
