# Small model for short ListOps expressions, which trains on one CPU core. This command generates the data:
#     python tools/dataset_converters/make_listops.py data/listops-small --min-length 20 --max-length 64 --max-depth 5
#         --max-args 5 --train 20000 --val 4000 --test 4000
_base_ = '../_base_/listops.py'
data_root = 'data/listops-small'
model = dict(max_length=64, width=128, depth=2, num_heads=4, mlp=256)
train_dataloader = dict(dataset=dict(data_root=data_root))
val_dataloader = dict(batch_size=200, dataset=dict(data_root=data_root))
test_dataloader = dict(batch_size=200, dataset=dict(data_root=data_root))
# The schedule is shorter, but its maximum learning rate, 0.05 / sqrt(1000), is the same as for the full-size model.
optim_wrapper = dict(optimizer=dict(lr=0.0224))
param_scheduler = [dict(type='WarmupInverseSqrtLR', warmup=200, by_epoch=False)]
train_cfg = dict(max_iters=500, val_interval=250)
default_hooks = dict(logger=dict(interval=20), checkpoint=dict(interval=250, max_keep_ckpts=1))
