from .levit import LeViTDTN
from .pvt import PVTDTN
from .swin import SwinDTN
from .t2t import T2TViTDTN
from .vit import ViTDTN

__all__ = ['LeViTDTN', 'PVTDTN', 'SwinDTN', 'T2TViTDTN', 'ViTDTN']
