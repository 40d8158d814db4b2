# Ablation of Tables 5 and 8: DTN in the first 4 of 12 blocks.
_base_ = './vit-s-star-dtn_8xb128_in1k.py'
model = dict(backbone=dict(dtn_layers=4))
