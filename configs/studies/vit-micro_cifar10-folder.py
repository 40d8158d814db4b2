# A ViT with LayerNorm for CIFAR-10 in class folders, as in the learning check of configs/vit. Training for 1.3 epochs
# takes three minutes on one CPU core. Each of the 4 blocks has 4 heads with 16 channels. Runs with DTN differ only in
# the normaliser.
_base_ = '../vit/vit-mini_4e_cifar10-folder.py'
model = dict(
    backbone=dict(arch=dict(width=64, depth=4, num_heads=4), dtn_layers=3, cls_from=3),
    head=dict(in_channels=64),
)
_loader = dict(num_workers=0, persistent_workers=False)
train_dataloader = dict(**_loader)
val_dataloader = dict(**_loader)
test_dataloader = dict(**_loader)
optim_wrapper = dict(optimizer=dict(fused=True))
max_iters = 522
train_cfg = dict(_delete_=True, **_base_.runtime.train_cfg, max_iters=max_iters, val_interval=174)
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-3, by_epoch=False, end=100),
    dict(type='CosineAnnealingLR', eta_min=1e-5, by_epoch=False, T_max=max_iters),
]
log_processor = dict(by_epoch=False)
default_hooks = dict(
    logger=dict(interval=10, log_metric_by_epoch=False),
    checkpoint=dict(by_epoch=False, interval=174, max_keep_ckpts=1, save_best=None),
)
