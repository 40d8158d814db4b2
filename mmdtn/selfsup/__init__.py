"""Self-supervised pre-training with DINO, and evaluation by k nearest neighbours and linear classifiers."""

from .dino import DINO, DINOHead, dino_loss
from .ema import TeacherEMA
from .hook import DINOHook
from .knn import Features, accuracy, neighbours
from .knn_loop import KNNLoop
from .linear import LinearProbe, ProbeAccuracy

__all__ = [
    'DINO',
    'DINOHead',
    'DINOHook',
    'Features',
    'KNNLoop',
    'LinearProbe',
    'ProbeAccuracy',
    'TeacherEMA',
    'accuracy',
    'dino_loss',
    'neighbours',
]
