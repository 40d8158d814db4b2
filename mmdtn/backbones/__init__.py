from .pvt import PVTDTN

__all__ = ['PVTDTN']
