_base_ = './vit-s-star_8xb128_in1k.py'
model = dict(backbone=dict(norm_cfg=dict(type='FeatureNorm'), cls_from=10))
