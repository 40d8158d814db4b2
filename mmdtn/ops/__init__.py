from .dtn import dtn, is_exporting
from .interface import Settings, Tensors
from .triton_check import prepare

__all__ = ['Settings', 'Tensors', 'dtn', 'is_exporting', 'prepare']
