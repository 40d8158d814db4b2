_base_ = '../_base_/dvt_b64_cifar.py'
model = dict(
    arch='t2t-12',
    num_classes=10,
    init_cfg=dict(type='Pretrained', checkpoint='work_dirs/dvt-t2t-12_8xb128_in1k/epoch_310.pth', heads=False),
)
data_preprocessor = dict(num_classes=10)
_data = dict(type='CIFAR10', data_root='data/cifar10')
train_dataloader = dict(dataset=dict(**_data, split='train', pipeline=_base_.train_pipeline))
val_dataloader = dict(dataset=dict(**_data, split='test', pipeline=_base_.test_pipeline))
calibration_dataloader = dict(
    batch_size=100,
    num_workers=4,
    dataset=dict(**_data, split='train', pipeline=_base_.calibration_pipeline),
    sampler=dict(type='DefaultSampler', shuffle=False),
)
test_dataloader = dict(_base_.val_dataloader, dataset=dict(**_data, split='test', pipeline=_base_.test_pipeline))
test_evaluator = _base_.val_evaluator
