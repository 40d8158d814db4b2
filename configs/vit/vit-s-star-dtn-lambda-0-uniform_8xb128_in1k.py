# Ablation of Tables 5 and 8: statistics over all tokens alone, as InstanceNorm's.
_base_ = './vit-s-star-dtn_8xb128_in1k.py'
model = dict(backbone=dict(norm_cfg=dict(mean_lambda=0.0, var_lambda=0.0, position='uniform')))
