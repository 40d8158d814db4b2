# Training pipeline of MMDetection's ms-crop schedules. Half of the images are cropped before they are resized.
_resize = dict(
    type='RandomChoiceResize',
    scales=[(short, 1333) for short in range(480, 801, 32)],
    keep_ratio=True,
)
ms_crop = [
    dict(type='LoadImageFromFile', backend_args=None),
    dict(type='LoadAnnotations', with_bbox=True, with_mask=True),
    dict(type='RandomFlip', prob=0.5),
    dict(
        type='RandomChoice',
        transforms=[
            [_resize],
            [
                dict(_resize, scales=[(400, 1333), (500, 1333), (600, 1333)]),
                dict(type='RandomCrop', crop_type='absolute_range', crop_size=(384, 600), allow_negative_crop=True),
                _resize,
            ],
        ],
    ),
    dict(type='PackDetInputs'),
]
