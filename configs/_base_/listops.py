# Trains on long ListOps sequences with the settings of Long-Range Arena (LRA): 5000 steps with 32 sequences each. The
# last checkpoint is tested. This command generates the data:
#     python tools/dataset_converters/make_listops.py data/listops
_base_ = './runtime.py'
default_scope = 'mmengine'
custom_imports = _base_.runtime.custom_imports
custom_hooks = _base_.runtime.custom_hooks
visualizer = dict(type='Visualizer', **_base_.runtime.visualizer)
data_root = 'data/listops'

# LRA's published configuration has 4 layers. The papers on LRA and DTN state 6 layers and an MLP width of 2048.
model = dict(
    type='SequenceClassifier',
    attention=dict(type='FullAttention'),
    norm_cfg=dict(type='LN'),
    max_length=2000,
    width=512,
    depth=4,
    num_heads=8,
    mlp=1024,
    dropout=0.1,
)

_data = dict(type='ListOps', data_root=data_root)
_loader = dict(batch_size=32, num_workers=0)
train_dataloader = dict(
    **_loader,
    dataset=dict(**_data, ann_file='basic_train.tsv'),
    sampler=dict(type='DefaultSampler', shuffle=True),
)
val_dataloader = dict(
    **_loader,
    dataset=dict(**_data, ann_file='basic_val.tsv'),
    sampler=dict(type='DefaultSampler', shuffle=False),
)
test_dataloader = dict(
    **_loader,
    dataset=dict(**_data, ann_file='basic_test.tsv'),
    sampler=dict(type='DefaultSampler', shuffle=False),
)
val_evaluator = dict(type='mmpretrain.Accuracy')
test_evaluator = val_evaluator

optim_wrapper = dict(
    type='OptimWrapper',
    optimizer=dict(type='AdamW', lr=0.05, betas=(0.9, 0.98), eps=1e-9, weight_decay=0.1),
)
param_scheduler = [dict(type='WarmupInverseSqrtLR', warmup=1000, by_epoch=False)]
auto_scale_lr = dict(base_batch_size=32)
train_cfg = dict(**_base_.runtime.train_cfg, max_iters=5000, val_interval=1000)
val_cfg = dict()
test_cfg = dict()
log_processor = dict(by_epoch=False)
default_hooks = dict(
    logger=dict(type='LoggerHook', interval=100, log_metric_by_epoch=False),
    checkpoint=dict(**_base_.runtime.default_hooks.checkpoint, by_epoch=False, interval=1000, max_keep_ckpts=2),
)
