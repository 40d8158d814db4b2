_base_ = '../_base_/dvt_8xb128_in1k.py'
