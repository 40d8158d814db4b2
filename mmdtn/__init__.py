"""Dynamic Token Normalization for MMPretrain and MMDetection. Importing it registers everything."""

from . import backbones, norms

__version__ = '0.1.0'
__all__ = ['backbones', 'norms']
