# What every run of this project has in addition to MMEngine's defaults. mmdet_runtime.py and mmpretrain_runtime.py
# merge it into the runtime of these packages. A recipe merges `train_cfg` into its schedule.
# tools/train.py merges all of it into configs that do not inherit it.
runtime = dict(
    custom_imports=dict(imports=['mmdtn']),
    # By epochs with max_epochs, by iterations with max_iters. A resumed run does what an uninterrupted one does.
    train_cfg=dict(type='ResumableLoop'),
    # No half files. An old checkpoint is deleted after the new one is there.
    default_hooks=dict(checkpoint=dict(type='WholeCheckpointHook')),
    custom_hooks=[
        dict(type='PendingGradientsHook'),  # saves gradients that accumulate
        dict(type='StopOnNonFiniteHook'),  # names images and layer of a loss that is not finite
        dict(type='ProgressHook'),
        dict(type='CheckClassesHook'),  # heads and data agree
        dict(type='MissedValidationHook'),  # runs the validation that a killed run did not finish
        dict(type='SkipBrokenImagesHook'),
    ],
    visualizer=dict(vis_backends=[dict(type='LocalVisBackend'), dict(type='TensorboardVisBackend')]),
)
