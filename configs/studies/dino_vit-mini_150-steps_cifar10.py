# Trains with DINO for 150 steps (9600 images), which takes a minute and a half on one idle core. All schedules end
# after 150 steps. The evaluation uses 20-NN with every fifth test image and every fifth training image.
_base_ = '../dino/dino_vit-mini_cifar10.py'
train_cfg = dict(max_iters=150, val_interval=150)
default_hooks = dict(logger=dict(interval=10), checkpoint=dict(interval=50))
_queries = dict(dataset=dict(indices=list(range(0, 10000, 5))))
_images = dict(dataset=dict(indices=list(range(0, 50000, 5))))
val_dataloader = dict(**_queries)
test_dataloader = dict(**_queries)
val_cfg = dict(bank=_images)
test_cfg = dict(bank=_images)
