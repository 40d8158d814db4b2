_base_ = '../_base_/listops.py'
