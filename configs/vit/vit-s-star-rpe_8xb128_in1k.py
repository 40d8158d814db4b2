# Table 10a of the paper: LayerNorm. The attention of the first 10 blocks uses the relative position of DTN's P (Eq. 6).
_base_ = './vit-s-star_8xb128_in1k.py'
model = dict(backbone=dict(rpe=True))
