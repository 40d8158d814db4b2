# Table 10a of the paper: LayerNorm. The attention of stages 1 to 3 uses the relative position of DTN's P (Eq. 6).
_base_ = './pvt-t_8xb128_in1k.py'
model = dict(backbone=dict(rpe=True))
