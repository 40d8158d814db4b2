# A classifier with the demo's backbone. Train it before running the study transfer.py, which uses its weights:
#     python tools/train.py configs/studies/pvt_cifar10-folder.py
_base_ = './vit-micro_10e_cifar10-folder.py'
model = dict(
    backbone=dict(
        _delete_=True,
        type='PVTDTN',
        arch=dict(
            base='b0',
            depths=(2, 2, 2, 1),
            widths=[32, 64, 128, 160],
            mlp_ratios=(4, 4, 4, 4),
            num_heads=(1, 2, 4, 5),
            norm_heads=(4, 4, 4, 4),
            drop_path_rate=0.0,
        ),
        norm_cfg=dict(type='LN'),
        out_type='cls_token',
    ),
    head=dict(in_channels=160),
)
