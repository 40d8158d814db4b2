title = 'Detection and instance segmentation on generated pictures'
config = 'configs/studies/mask-rcnn_pvt_shapes.py'
metrics = {'box AP': 'coco/bbox_mAP', 'mask AP': 'coco/segm_mAP'}
_norm = 'model.backbone.norm_cfg'
variants = {
    'LN': {},
    'DTN': {f'{_norm}.type': 'DTN'},
    'DTN without prenorm': {f'{_norm}.type': 'DTN', f'{_norm}.prenorm': False},
}
_sizes = {'0.5x': 80, '1.5x': 240, '2x': 320}
evaluations = {
    **{
        name: dict(
            title='Tested at other sizes than trained at, box AP x 100; 1x is the table above',
            options={'test_dataloader.dataset.pipeline.1.scale': (size, size)},
            metrics={'box AP': 'coco/bbox_mAP'},
        )
        for name, size in _sizes.items()
    },
    'corrupted': dict(
        title='Boxes on 20 test pictures, clean (P) and under 15 corruptions in severity 3 (mPC); rPC = mPC / P',
        tool='tools/analysis_tools/test_robustness.py',
        arguments=('--pictures', '20', '--severities', '3'),
        metrics={name: f'bbox_mAP_{name}' for name in ('P', 'mPC', 'rPC')},
    ),
}
