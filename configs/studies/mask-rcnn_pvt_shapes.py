# The demo's model with LayerNorm, trained in one process with batch size 2. The data, the learning rate and the warm-up
# are the same as in the demo. Training lasts one epoch (600 iterations) instead of seven and takes two minutes on one
# core.
_base_ = '../demo/mask-rcnn_pvt-dtn_shapes.py'
model = dict(backbone=dict(norm_cfg=dict(type='LN')))
max_iters = 600
train_cfg = dict(_delete_=True, **_base_.runtime.train_cfg, max_iters=max_iters, val_interval=200)
param_scheduler = [
    dict(type='LinearLR', start_factor=0.01, by_epoch=False, end=300),
    dict(type='CosineAnnealingLR', eta_min_ratio=0.01, T_max=max_iters, by_epoch=False),
]
log_processor = dict(by_epoch=False)
default_hooks = dict(logger=dict(interval=20, log_metric_by_epoch=False), checkpoint=dict(by_epoch=False, interval=200))
