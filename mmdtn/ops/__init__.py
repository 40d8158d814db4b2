from .dtn import dtn
from .reference import Settings

__all__ = ['Settings', 'dtn']
