_base_ = './cifar10.py'
title = 'CIFAR-10: the same ViT, ten epochs'
config = 'configs/studies/vit-micro_10e_cifar10-folder.py'
_chosen = {name: _base_.variants[name] for name in ('LN', 'DTN', 'DTN uniform', 'DTN half', 'DTN without prenorm')}
variants = dict(_delete_=True, **_chosen)
few = ()
