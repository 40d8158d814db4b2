from .classifier import DVT
from .metric import ExitAccuracy

__all__ = ['DVT', 'ExitAccuracy']
