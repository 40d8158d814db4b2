_base_ = ['../_base_/vit-b_cifar-224.py', 'mmpretrain::_base_/datasets/cifar10_bs16.py']
train_dataloader = dict(batch_size=128, num_workers=4, dataset=dict(pipeline=_base_.train_transforms))
val_dataloader = dict(batch_size=128, num_workers=4, dataset=dict(pipeline=_base_.test_transforms))
test_dataloader = dict(batch_size=128, num_workers=4, dataset=dict(pipeline=_base_.test_transforms))
val_evaluator = _base_.test_metrics
test_evaluator = _base_.test_metrics
