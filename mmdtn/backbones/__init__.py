from .pvt import PVTDTN
from .swin import SwinDTN
from .vit import ViTDTN

__all__ = ['PVTDTN', 'SwinDTN', 'ViTDTN']
