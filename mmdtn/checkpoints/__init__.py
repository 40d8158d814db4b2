from .arguments import settings_by_arguments
from .dtn import from_dtn_pvt, from_dtn_vit
from .dvt import from_dvt, to_dvt
from .files import UnfitFile, load, read, state_of, write
from .formats import CHOICES
from .levit import from_levit, from_mmpretrain_levit, from_timm_levit
from .origin import backbone_settings
from .pvt import from_mmdet_pvt, from_pvt, from_timm_pvt_v2
from .swin import from_microsoft_swin, from_mmdet_swin, from_mmpretrain_swin, from_timm_swin
from .t2t import from_mmpretrain_t2t, from_t2t
from .translation import TranslationReport, translate
from .vit import from_mmpretrain_vit, from_timm_vit

__all__ = [
    'CHOICES',
    'TranslationReport',
    'UnfitFile',
    'backbone_settings',
    'from_dtn_pvt',
    'from_dtn_vit',
    'from_dvt',
    'from_levit',
    'from_microsoft_swin',
    'from_mmdet_pvt',
    'from_mmdet_swin',
    'from_mmpretrain_levit',
    'from_mmpretrain_swin',
    'from_mmpretrain_t2t',
    'from_mmpretrain_vit',
    'from_pvt',
    'from_t2t',
    'from_timm_levit',
    'from_timm_pvt_v2',
    'from_timm_swin',
    'from_timm_vit',
    'load',
    'read',
    'settings_by_arguments',
    'state_of',
    'to_dvt',
    'translate',
    'write',
]
