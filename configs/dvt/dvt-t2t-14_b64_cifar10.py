_base_ = './dvt-t2t-12_b64_cifar10.py'
model = dict(arch='t2t-14', init_cfg=dict(checkpoint='work_dirs/dvt-t2t-14_8xb64_in1k/epoch_310.pth'))
