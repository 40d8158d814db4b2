title = 'DINO on CIFAR-10'
config = 'configs/studies/dino_vit-mini_150-steps_cifar10.py'
metrics = {'20-NN top-1': 'accuracy/20-NN'}
variants = {'LN': {}, 'DTN': {'model.backbone.norm_cfg.type': 'DTN'}}
