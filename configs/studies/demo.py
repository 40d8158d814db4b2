# One process with batches of 4, where `make demo` has two processes with batches of 2: about 15 minutes of one core.
title = 'The demo: seven epochs on generated pictures'
config = 'configs/demo/mask-rcnn_pvt-dtn_shapes.py'
metrics = {'box AP': 'coco/bbox_mAP', 'mask AP': 'coco/segm_mAP'}
seeds = (0, 1, 2, 3, 4)
baseline = 'DTN'
_run = {'train_dataloader.batch_size': 4, 'train_cfg.val_interval': 3}
_norm = 'model.backbone.norm_cfg'
variants = {
    'DTN': _run,
    'DTN without prenorm': {**_run, f'{_norm}.prenorm': False},
    'LN': {**_run, f'{_norm}.type': 'LN'},
}
