# The variant with two exits, whose speed is reported in the paper.
_base_ = './dvt-t2t-12_8xb128_in1k.py'
model = dict(grids=(7, 14))
