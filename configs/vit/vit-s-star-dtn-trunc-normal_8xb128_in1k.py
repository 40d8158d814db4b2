# Ablation of Tables 5 and 8: the initial neighbourhoods are almost uniform instead of local.
_base_ = './vit-s-star-dtn_8xb128_in1k.py'
model = dict(backbone=dict(norm_cfg=dict(position_init='trunc_normal')))
