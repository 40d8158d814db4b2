from .cross_entropy import CrossEntropy
from .robustness import (
    ALEXNET,
    SubsetAccuracy,
    corruption_error,
    imagenet_folders,
    is_whole_benchmark,
    mean_corruption_error,
    mean_error,
    performance,
)

__all__ = [
    'ALEXNET',
    'CrossEntropy',
    'SubsetAccuracy',
    'corruption_error',
    'imagenet_folders',
    'is_whole_benchmark',
    'mean_corruption_error',
    'mean_error',
    'performance',
]
