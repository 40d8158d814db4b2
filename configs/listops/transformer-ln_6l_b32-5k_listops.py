_base_ = './transformer-ln_b32-5k_listops.py'
model = dict(depth=6, mlp=2048)
