"""Dynamic Token Normalization for MMPretrain and MMDetection. Importing it registers everything."""

import sys

try:
    if 'mmdtn.doctor' not in sys.orig_argv:  # which has to run where these cannot be imported
        from mmengine.config.utils import MODULE2PACKAGE

        from . import backbones, dvt, engine, evaluation, norms
        from .surgery import convert_norms

        # mmengine finds _base_ = 'package::config' in OpenMMLab's own packages alone, which it lists by name.
        MODULE2PACKAGE.setdefault('mmdtn', 'mmdtn')
except ModuleNotFoundError as error:
    if error.name != 'cv2':
        raise
    # Two packages have it, of which only one may be installed; so neither mmengine nor this package declares one.
    message = 'mmdtn needs cv2, which mmengine imports: pip install opencv-python-headless (or opencv-python, not both)'
    raise ModuleNotFoundError(message, name='cv2') from None

__version__ = '0.3.1'
__all__ = ['backbones', 'convert_norms', 'dvt', 'engine', 'evaluation', 'norms']
