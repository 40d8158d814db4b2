title = 'Transfer: from a classifier with LayerNorm to detectors'
config = 'configs/studies/mask-rcnn_pvt-pretrained_shapes.py'
metrics = {'box AP': 'coco/bbox_mAP', 'mask AP': 'coco/segm_mAP'}
_backbone = 'model.backbone'
variants = {
    'LN': {},
    'DTN from a warm start': {
        f'{_backbone}.norm_cfg.type': 'DTN',
        f'{_backbone}.norm_cfg.prenorm': False,
        f'{_backbone}.norm_cfg.eps': 1e-6,
        f'{_backbone}.init_cfg.warm_start': 0.999,
    },
}
