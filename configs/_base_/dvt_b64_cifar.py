# T2T-ViT's recipe for transfer to CIFAR, which the authors of DVT follow. Configs add the dataset, the classes and the
# pretrained weights.
_base_ = './mmpretrain_runtime.py'
model = dict(type='DVT', train_cfg=dict(frozen=['norm', 'cls_token']))  # the authors do not train these parameters
data_preprocessor = dict(mean=[125.307, 122.961, 113.8575], std=[51.5865, 50.847, 51.255], to_rgb=False)
_resize = dict(type='Resize', scale=(224, 224), backend='pillow', interpolation='bilinear')
_flip = dict(type='RandomFlip', prob=0.5, direction='horizontal')
train_pipeline = [_resize, dict(type='RandomCrop', crop_size=224, padding=28), _flip, dict(type='PackInputs')]
test_pipeline = [_resize, dict(type='PackInputs')]
calibration_pipeline = [_resize, _flip, dict(type='PackInputs')]
train_dataloader = dict(batch_size=64, num_workers=4, sampler=dict(type='DefaultSampler', shuffle=True))
val_dataloader = dict(batch_size=100, num_workers=4, sampler=dict(type='DefaultSampler', shuffle=False))
val_evaluator = dict(type='ExitAccuracy')
# New heads start with a learning rate of 0.05, and all other parameters with 0.0005. All learning rates end at 2e-4.
optim_wrapper = dict(
    optimizer=dict(type='SGD', lr=0.05, momentum=0.9, weight_decay=5e-4),
    paramwise_cfg=dict(custom_keys={name: dict(lr_mult=0.01) for name in ('stem', 'blocks', 'relations')}),
)
param_scheduler = [dict(type='CosineAnnealingLR', eta_min=2e-4, by_epoch=True, end=60)]
train_cfg = dict(**_base_.runtime.train_cfg, max_epochs=60, val_interval=1)
val_cfg = dict()
test_cfg = dict()
default_hooks = dict(checkpoint=dict(max_keep_ckpts=3, save_best='accuracy/top1'))
auto_scale_lr = dict(base_batch_size=64)
