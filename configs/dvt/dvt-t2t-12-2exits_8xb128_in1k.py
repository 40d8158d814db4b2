# The variant with two exits. The paper reports its speed.
_base_ = './dvt-t2t-12_8xb128_in1k.py'
model = dict(grids=(7, 14))
