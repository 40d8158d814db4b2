from .cost import SavedBytes

__all__ = ['SavedBytes']
