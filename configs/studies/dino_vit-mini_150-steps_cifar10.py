# The first 150 steps of DINO with a short schedule, 9600 images: a minute and a half of one free core.
_base_ = '../dino/dino_vit-mini_cifar10.py'
train_cfg = dict(max_iters=150, val_interval=150)
default_hooks = dict(logger=dict(interval=10), checkpoint=dict(interval=50))
