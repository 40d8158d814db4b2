"""Dynamic Token Normalization for MMPretrain and MMDetection. Importing the package registers its classes."""

import warnings
from typing import Any

__version__ = '0.5.0'
__all__ = ['backbones', 'convert_norms', 'dvt', 'engine', 'evaluation', 'norms', 'selfsup', 'sequences']

try:
    from mmengine.config.utils import MODULE2PACKAGE

    from . import backbones, dvt, engine, evaluation, norms, selfsup, sequences
    from .surgery.conversion import convert_norms

    # MMEngine resolves _base_ = 'package::config' only for packages in this table, which lists OpenMMLab's packages.
    MODULE2PACKAGE.setdefault('mmdtn', 'mmdtn')
except ModuleNotFoundError as error:
    # Do not raise an error yet: `python -m mmdtn.doctor` imports this file, and tells users what to install.
    # The two packages that provide cv2 must not be installed together, so mmengine and mmdtn depend on neither.
    name = (error.name or '').partition('.')[0]
    hint = 'pip install opencv-python-headless (or opencv-python, not both)' if name == 'cv2' else ''
    _missing = f'mmdtn needs {name}: {hint or "run `python -m mmdtn.doctor` to see how to install it"}'
    warnings.warn(f'{_missing}. Nothing is registered.', stacklevel=2)

    def __getattr__(name: str) -> Any:
        if name in __all__:
            raise ModuleNotFoundError(_missing)
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
