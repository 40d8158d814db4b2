"""Dynamic Token Normalization for MMPretrain and MMDetection. Importing it registers everything."""

from mmengine.config.utils import MODULE2PACKAGE

from . import backbones, engine, norms

# mmengine finds _base_ = 'package::config' in OpenMMLab's own packages alone, which it lists by name.
MODULE2PACKAGE.setdefault('mmdtn', 'mmdtn')

__version__ = '0.1.0'
__all__ = ['backbones', 'engine', 'norms']
