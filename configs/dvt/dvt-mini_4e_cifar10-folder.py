# A cascade with 4 x 4 and 8 x 8 tokens for CIFAR-10 in class folders. Training on a CPU takes minutes.
_base_ = '../vit/vit-mini_4e_cifar10-folder.py'
model = dict(
    _delete_=True,
    type='DVT',
    arch=dict(base='deit-s', width=96, depth=4, num_heads=3, mlp_ratio=2),
    num_classes=10,
    grids=(4, 8),
    img_size=32,
    drop_path_rate=0.0,
)
val_evaluator = dict(_delete_=True, type='ExitAccuracy')
test_evaluator = dict(_delete_=True, type='ExitAccuracy')
_test = _base_.val_dataloader
calibration_dataloader = dict(_test, dataset=dict(_test.dataset, data_prefix='train'))
default_hooks = dict(checkpoint=dict(save_best='accuracy/top1'))
