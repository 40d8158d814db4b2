from .base import TokenNorm
from .batch import PRepBN, RepBN, TokenBN
from .batch_statistics import BatchStatisticsNorm, MovingAverageNorm, start_new_task
from .build import Place, build_norm, needs_grid, norm_class
from .dtn import DTN, DTN2d
from .feature import FeatureNorm
from .image import TokenGN, TokenIN
from .layer import LayerNorm
from .pointwise import Derf, DyT
from .power import PowerNorm
from .rms import RMSNorm, ScaleNorm
from .switchable import SN
from .un import UN

__all__ = [
    'DTN',
    'SN',
    'UN',
    'BatchStatisticsNorm',
    'DTN2d',
    'Derf',
    'DyT',
    'FeatureNorm',
    'LayerNorm',
    'MovingAverageNorm',
    'PRepBN',
    'Place',
    'PowerNorm',
    'RMSNorm',
    'RepBN',
    'ScaleNorm',
    'TokenBN',
    'TokenGN',
    'TokenIN',
    'TokenNorm',
    'build_norm',
    'needs_grid',
    'norm_class',
    'start_new_task',
]
