# Common settings of DINO (arXiv 2104.14294). Configs based on this file define the backbone, the data and the number of
# epochs.
_base_ = './mmpretrain_runtime.py'
model = dict(type='DINO', backbone=dict(type='ViTDTN', drop_path_rate=0.1), head=dict(type='DINOHead'))
optim_wrapper = dict(
    optimizer=dict(type='AdamW', lr=1e-3, weight_decay=0.04),
    paramwise_cfg=dict(
        norm_decay_mult=0.0,
        bias_decay_mult=0.0,
        flat_decay_mult=0.0,  # for vectors; custom_keys lists the positions of DTN and rpe, which are matrices
        custom_keys={name: dict(decay_mult=0.0) for name in ('.norm1.', '.norm2.', 'rpe.position')},
    ),
)
custom_hooks = [dict(type='DINOHook'), *_base_.custom_hooks]
# As in the published code, the colours of each view are augmented on PIL images.
colours = [
    dict(type='torchvision/RandomHorizontalFlip', p=0.5),
    dict(
        type='RandomApply',
        prob=0.8,
        transforms=[dict(type='torchvision/ColorJitter', brightness=0.4, contrast=0.4, saturation=0.2, hue=0.1)],
    ),
    dict(type='torchvision/RandomGrayscale', p=0.2),
    dict(type='PILToNumpy', to_bgr=True),  # channel order of MMCV
]
