# Each run uses one process with batch size 4 and takes about 9 minutes on one core. `make demo` uses two processes with
# batch size 2 instead.
title = 'The demo: seven epochs on generated images'
config = 'configs/demo/mask-rcnn_pvt-dtn_shapes.py'
metrics = {'box AP': 'coco/bbox_mAP', 'mask AP': 'coco/segm_mAP'}
seeds = (0, 1, 2, 3, 4)
_run = {'train_dataloader.batch_size': 4, 'train_cfg.val_interval': 3}
_norm = 'model.backbone.norm_cfg'
variants = {
    'LN': {**_run, f'{_norm}.type': 'LN'},
    'DTN': _run,
    'DTN without prenorm': {**_run, f'{_norm}.prenorm': False},
}
_sizes = {'0.5x': 80, '1.5x': 240, '2x': 320}
evaluations = {
    **{
        name: dict(
            title='Box AP x 100 at other image sizes than in training (1x is in the table above)',
            options={'test_dataloader.dataset.pipeline.1.scale': (size, size)},
            metrics={'box AP': 'coco/bbox_mAP'},
        )
        for name, size in _sizes.items()
    },
    'corrupted': dict(
        title='Boxes on 50 test images, clean (P) and with 15 corruptions of severity 3 (mPC), and rPC = mPC / P',
        tool='tools/analysis_tools/test_robustness.py',
        arguments=('--pictures', '50', '--severities', '3'),
        metrics={name: f'bbox_mAP_{name}' for name in ('P', 'mPC', 'rPC')},
    ),
}
