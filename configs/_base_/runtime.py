# Settings that extend MMEngine's defaults in every run of this project. The files mmdet_runtime.py and
# mmpretrain_runtime.py merge the settings into the runtimes of the two packages, and recipes merge `train_cfg` into
# their schedules. tools/train.py merges the settings into all other configs.
runtime = dict(
    custom_imports=dict(imports=['mmdtn']),
    # Counts epochs with max_epochs and iterations with max_iters. A resumed run equals an uninterrupted run.
    train_cfg=dict(type='ResumableLoop'),
    # Never leaves partial checkpoints, and deletes an old checkpoint only after the new one is written.
    default_hooks=dict(checkpoint=dict(type='WholeCheckpointHook')),
    custom_hooks=[
        dict(type='PendingGradientsHook'),  # saves accumulated gradients in checkpoints
        dict(type='StopOnNonFiniteHook'),  # stops at a non-finite loss and names the images and the layer
        dict(type='ProgressHook'),
        dict(type='CheckClassesHook'),  # checks that heads and data have the same number of classes
        dict(type='MissedValidationHook'),  # runs a validation that a killed run left unfinished
        dict(type='SkipBrokenImagesHook'),
    ],
    visualizer=dict(vis_backends=[dict(type='LocalVisBackend'), dict(type='TensorboardVisBackend')]),
)
