# The demo's detector with LayerNorm. After `make demo`, which makes the data:
#     tools/dist_train.sh configs/demo/mask-rcnn_pvt-ln_shapes.py 2
_base_ = './mask-rcnn_pvt-dtn_shapes.py'
model = dict(backbone=dict(norm_cfg=dict(type='LN')))
