# The demo's detector with LayerNorm. First run `make demo`, which generates the data, and then this command:
#     tools/dist_train.sh configs/demo/mask-rcnn_pvt-ln_shapes.py 2
_base_ = './mask-rcnn_pvt-dtn_shapes.py'
model = dict(backbone=dict(norm_cfg=dict(type='LN')))
