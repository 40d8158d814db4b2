"""Determines the model of a checkpoint from the arguments of the training script that wrote it.

Checkpoints of timm's training script contain the arguments of the script. The model name determines the number of
heads, and ``norm_type`` determines the normaliser. The tensors of a checkpoint do not always determine these
properties.
"""

import argparse
import re
from collections.abc import Mapping
from typing import Any

from .dtn import CLS_FROM, LN_1E_5, NORMS

SIZES_OF_VIT = {'ti': 't', 'ti_star': 't*', 's': 's', 's_star': 's*', 'b': 'b', 'b_star': 'b*'}
T2T = re.compile(r'[tT]2t_vit_(7|10|12|14|19|24|t_14|t_19|t_24|14_resnext|14_wide|14_all_un1d)')


def settings_by_arguments(checkpoint: Any) -> tuple[str, dict[str, Any]] | None:
    """Returns the format of a training checkpoint and the settings of its backbone in this package.

    Returns None if the checkpoint has no arguments or if its arguments do not determine the settings.
    """
    found = checkpoint.get('args') if isinstance(checkpoint, dict) else None
    args = vars(found) if isinstance(found, argparse.Namespace) else found
    if not isinstance(args, Mapping) or not isinstance(name := args.get('model'), str):
        return None
    if match := T2T.fullmatch(name):
        norm_cfg = dict(type='UN' if name.endswith('un1d') else 'LN')
        settings = dict(arch=match[1].removesuffix('_all_un1d').replace('_', '-'), img_size=args.get('img_size') or 224)
        return 't2t', dict(type='T2TViTDTN', **settings, norm_cfg=norm_cfg, other_norm_cfg=norm_cfg)
    norm_type = args.get('norm_type')
    if norm_type not in NORMS:
        return None
    if match := re.fullmatch(r'pvt_(tiny|small|medium|large)_norm', name):
        arch = dict(base=match[1], num_heads=(4, 4, 5, 8))
        return 'dtn', dict(type='PVTDTN', arch=arch, norm_cfg=NORMS[norm_type])
    if (match := re.fullmatch(r'vit_norm_(.+)', name)) and match[1] in SIZES_OF_VIT:
        inside = args.get('local_up_to_layer', CLS_FROM)
        norm_cfg = LN_1E_5 if norm_type == 'layer' else NORMS[norm_type]
        settings = dict(arch=SIZES_OF_VIT[match[1]], norm_cfg=norm_cfg, dtn_layers=inside, cls_from=inside)
        return 'dtn', dict(type='ViTDTN', **settings, other_norm_cfg=LN_1E_5)
    if (match := re.fullmatch(r'vit_(.+)', name)) and match[1] in SIZES_OF_VIT:
        if norm_type != 'layer':
            raise ValueError(
                f'{name} with norm_type={norm_type} uses this normaliser before attention and LayerNorm before MLPs. '
                'ViTDTN uses the same normaliser in both places, so it cannot compute the same as this model.'
            )
        return 'dtn', dict(type='ViTDTN', arch=SIZES_OF_VIT[match[1]], norm_cfg=LN_1E_5)
    return None
