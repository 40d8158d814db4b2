"""Dynamic Token Normalization for MMPretrain and MMDetection. Importing it registers the classes that configs name."""

import warnings
from typing import Any

__version__ = '0.4.0'
__all__ = ['backbones', 'convert_norms', 'dvt', 'engine', 'evaluation', 'norms', 'selfsup']

try:
    from mmengine.config.utils import MODULE2PACKAGE

    from . import backbones, dvt, engine, evaluation, norms, selfsup
    from .surgery.conversion import convert_norms

    # mmengine finds _base_ = 'package::config' in OpenMMLab's own packages alone, which it lists by name.
    MODULE2PACKAGE.setdefault('mmdtn', 'mmdtn')
except ModuleNotFoundError as error:
    # Not raised at once: `python -m mmdtn.doctor`, which says what to install, imports this file first.
    # Two packages have cv2, of which only one may be installed; so neither mmengine nor this package declares one.
    name = (error.name or '').partition('.')[0]
    hint = 'pip install opencv-python-headless (or opencv-python, not both)' if name == 'cv2' else ''
    _missing = f'mmdtn needs {name}: {hint or "`python -m mmdtn.doctor` says how to install it"}'
    warnings.warn(f'{_missing}. Nothing is registered.', stacklevel=2)

    def __getattr__(name: str) -> Any:
        if name in __all__:
            raise ModuleNotFoundError(_missing)
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
