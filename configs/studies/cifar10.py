title = 'CIFAR-10: a small ViT from scratch'
config = 'configs/studies/vit-micro_cifar10-folder.py'
metrics = {'top-1': 'accuracy/top1'}
_norm = 'model.backbone.norm_cfg'
variants = {
    'LN': {},
    'DTN': {f'{_norm}.type': 'DTN'},
    'DTN without prenorm': {f'{_norm}.type': 'DTN', f'{_norm}.prenorm': False},
    'DTN uniform': {f'{_norm}.type': 'DTN', f'{_norm}.position': 'uniform'},
    'DTN half': {f'{_norm}.type': 'DTN', f'{_norm}.mean_lambda': 0.5, f'{_norm}.var_lambda': 0.5},
    'RMSNorm': {f'{_norm}.type': 'RMSNorm'},
    'BN': {f'{_norm}.type': 'BN'},
    'DyT': {f'{_norm}.type': 'DyT'},
}
few = ('RMSNorm', 'BN', 'DyT')
evaluations = {
    'corrupted': dict(
        title='Errors in percent on 200 test images, clean and with 15 corruptions of severities 1 to 5',
        tool='tools/analysis_tools/test_robustness.py',
        arguments=('--pictures', '200'),
        metrics={
            'clean error': 'clean_error',
            "mean error (what the paper's Table 6 calls mCE)": 'mean_error',
            "mCE (in AlexNet's errors on ImageNet)": 'mCE',
        },
    ),
}
