from .attention import BigBirdAttention, FullAttention, ReformerAttention
from .encoder import SequenceClassifier, SequencePreprocessor
from .listops import ListOps
from .schedule import WarmupInverseSqrtLR

__all__ = [
    'BigBirdAttention',
    'FullAttention',
    'ListOps',
    'ReformerAttention',
    'SequenceClassifier',
    'SequencePreprocessor',
    'WarmupInverseSqrtLR',
]
