# The detector of the demo with LayerNorm. Run this command after `make demo`, which generates the data:
#     tools/dist_train.sh configs/demo/mask-rcnn_pvt-ln_shapes.py 2
_base_ = './mask-rcnn_pvt-dtn_shapes.py'
model = dict(backbone=dict(norm_cfg=dict(type='LN')))
