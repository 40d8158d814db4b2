# 150 steps of DINO with a schedule of that length, 9600 images; a minute and a half of one free core. Then 20-NN of one
# in five test images among one in five training images.
_base_ = '../dino/dino_vit-mini_cifar10.py'
train_cfg = dict(max_iters=150, val_interval=150)
default_hooks = dict(logger=dict(interval=10), checkpoint=dict(interval=50))
_queries = dict(dataset=dict(indices=list(range(0, 10000, 5))))
_images = dict(dataset=dict(indices=list(range(0, 50000, 5))))
val_dataloader = dict(**_queries)
test_dataloader = dict(**_queries)
val_cfg = dict(bank=_images)
test_cfg = dict(bank=_images)
