from .dtn import dtn, is_exporting
from .interface import Settings, Tensors

__all__ = ['Settings', 'Tensors', 'dtn', 'is_exporting']
