# Ablation of Tables 5 and 8: only statistics of the neighbourhood are used.
_base_ = './vit-s-star-dtn_8xb128_in1k.py'
model = dict(backbone=dict(norm_cfg=dict(mean_lambda=0.0, var_lambda=0.0)))
