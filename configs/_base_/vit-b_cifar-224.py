# ViT-B/16 on CIFAR at 224 pixels, with the settings of a student project that compared normalisers: batch size 128, SGD
# with learning rate 0.01, a cosine schedule to 1%, and 300 epochs. Inherit this file together with one of MMPretrain's
# CIFAR datasets. Only the normaliser changes for DTN.
_base_ = ['./mmpretrain_runtime.py', './no_decay.py']
model = dict(
    type='mmpretrain.ImageClassifier',  # configs that inherit through mmdtn:: need the scope
    backbone=dict(type='ViTDTN', arch='b', norm_cfg=dict(type='LN'), dtn_layers=10, cls_from=10, drop_path_rate=0.0),
    head=dict(
        type='LinearClsHead',
        num_classes=10,
        in_channels=768,
        loss=dict(type='CrossEntropyLoss', loss_weight=1.0),
        topk=(1,),
        cal_acc=True,
    ),
)
train_transforms = [
    dict(type='RandomResizedCrop', scale=224),
    dict(type='RandomFlip', prob=0.5, direction='horizontal'),
    dict(type='PackInputs'),
]
test_transforms = [
    dict(type='ResizeEdge', scale=256, edge='short'),
    dict(type='CenterCrop', crop_size=224),
    dict(type='PackInputs'),
]
test_metrics = [dict(type='mmpretrain.Accuracy', topk=(1, 5)), dict(type='CrossEntropy')]
optim_wrapper = dict(
    optimizer=dict(type='SGD', lr=0.01, momentum=0.9, weight_decay=5e-5), paramwise_cfg=dict(**_base_.no_decay)
)
param_scheduler = [dict(type='CosineAnnealingLR', eta_min=1e-4, T_max=300, by_epoch=True)]
train_cfg = dict(**_base_.runtime.train_cfg, max_epochs=300, val_interval=1)
val_cfg = dict()
test_cfg = dict()
default_hooks = dict(checkpoint=dict(interval=50, save_best='accuracy/top1'))
# The log also contains the means over each epoch.
log_processor = dict(
    custom_cfg=[
        dict(data_src='loss', log_name='epoch_loss', method_name='mean', window_size='epoch'),
        dict(data_src='accuracy_top-1', log_name='epoch_accuracy', method_name='mean', window_size='epoch'),
    ]
)
auto_scale_lr = dict(base_batch_size=128)
