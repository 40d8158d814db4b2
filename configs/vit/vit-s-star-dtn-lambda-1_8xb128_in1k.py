# Ablation of Tables 5 and 8: only the statistics of LayerNorm are used.
_base_ = './vit-s-star-dtn_8xb128_in1k.py'
model = dict(backbone=dict(norm_cfg=dict(mean_lambda=1.0, var_lambda=1.0)))
