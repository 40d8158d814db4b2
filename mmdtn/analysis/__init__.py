from .attention import attention, attention_distance, class_token_attention
from .capture import BlockTokens, Capture
from .cost import SavedBytes, exit_flops, flops_by_module, norm_flops
from .neighbourhood import at_start, attended, kernels, lambdas, mean_distance
from .tokens import magnitudes, means, principal_components, seen_by, variation

__all__ = [
    'BlockTokens',
    'Capture',
    'SavedBytes',
    'at_start',
    'attended',
    'attention',
    'attention_distance',
    'class_token_attention',
    'exit_flops',
    'flops_by_module',
    'kernels',
    'lambdas',
    'magnitudes',
    'mean_distance',
    'means',
    'norm_flops',
    'principal_components',
    'seen_by',
    'variation',
]
