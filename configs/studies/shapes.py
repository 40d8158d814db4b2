title = 'Detection and instance segmentation on generated images'
config = 'configs/studies/mask-rcnn_pvt_shapes.py'
metrics = {'box AP': 'coco/bbox_mAP', 'mask AP': 'coco/segm_mAP'}
_norm = 'model.backbone.norm_cfg'
variants = {
    'LN': {},
    'DTN': {f'{_norm}.type': 'DTN'},
    'DTN without prenorm': {f'{_norm}.type': 'DTN', f'{_norm}.prenorm': False},
}
