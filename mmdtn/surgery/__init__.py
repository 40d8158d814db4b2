from .conversion import ConversionReport, convert_norms
from .fusion import FusedNorm, fuse

__all__ = ['ConversionReport', 'FusedNorm', 'convert_norms', 'fuse']
