from .shapes import CLASSES, METAINFO, TRAIN, VAL, draw_scene, write_classification, write_coco

__all__ = ['CLASSES', 'METAINFO', 'TRAIN', 'VAL', 'draw_scene', 'write_classification', 'write_coco']
