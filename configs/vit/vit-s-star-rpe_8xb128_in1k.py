# Table 10a of the paper: LayerNorm, with the relative position of DTN's P (Eq. 6) in the attention of the first 10
# blocks.
_base_ = './vit-s-star_8xb128_in1k.py'
model = dict(backbone=dict(rpe=True))
