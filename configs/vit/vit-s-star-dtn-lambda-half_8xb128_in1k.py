# Ablation of Tables 5 and 8: both kinds of statistics have the fixed weight 1/2.
_base_ = './vit-s-star-dtn_8xb128_in1k.py'
model = dict(backbone=dict(norm_cfg=dict(mean_lambda=0.5, var_lambda=0.5)))
