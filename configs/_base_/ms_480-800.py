# Training pipelines that resize the short side of each image to a random length between 480 and 800 pixels.
_resize = dict(
    type='RandomChoiceResize',
    scales=[(1333, short) for short in range(480, 801, 32)],
    keep_ratio=True,
)
ms_boxes = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations', with_bbox=True),
    _resize,
    dict(type='RandomFlip', prob=0.5),
    dict(type='PackDetInputs'),
]
ms_masks = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations', with_bbox=True, with_mask=True),
    _resize,
    dict(type='RandomFlip', prob=0.5),
    dict(type='PackDetInputs'),
]
