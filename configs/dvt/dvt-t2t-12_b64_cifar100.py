_base_ = './dvt-t2t-12_b64_cifar10.py'
model = dict(num_classes=100)
data_preprocessor = dict(num_classes=100)
_data = dict(type='CIFAR100', data_root='data/cifar100')
train_dataloader = dict(dataset=_data)
val_dataloader = dict(dataset=_data)
test_dataloader = dict(dataset=_data)
calibration_dataloader = dict(dataset=_data)
