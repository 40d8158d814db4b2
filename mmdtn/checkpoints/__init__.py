from .pvt import from_mmdet_pvt, from_timm_pvt_v2

__all__ = ['from_mmdet_pvt', 'from_timm_pvt_v2']
