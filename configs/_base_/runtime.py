# Settings that every run of this project has in addition to MMEngine's defaults. mmdet_runtime.py and
# mmpretrain_runtime.py merge them into the runtime of these packages, and recipes merge `train_cfg` into their
# schedule. tools/train.py merges all settings into configs that do not inherit them.
runtime = dict(
    custom_imports=dict(imports=['mmdtn']),
    # Counts epochs with max_epochs and iterations with max_iters. A resumed run equals an uninterrupted one.
    train_cfg=dict(type='ResumableLoop'),
    # Never leaves partial checkpoints, and deletes an old checkpoint only after the new one is written.
    default_hooks=dict(checkpoint=dict(type='WholeCheckpointHook')),
    custom_hooks=[
        dict(type='PendingGradientsHook'),  # saves accumulated gradients in checkpoints
        dict(type='StopOnNonFiniteHook'),  # stops at a loss that is not finite and names its images and layer
        dict(type='ProgressHook'),
        dict(type='CheckClassesHook'),  # checks that heads and data have the same number of classes
        dict(type='MissedValidationHook'),  # runs a validation that a killed run did not finish
        dict(type='SkipBrokenImagesHook'),
    ],
    visualizer=dict(vis_backends=[dict(type='LocalVisBackend'), dict(type='TensorboardVisBackend')]),
)
