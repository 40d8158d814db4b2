from .dtn import DTN, DTN2d

__all__ = ['DTN', 'DTN2d']
