"""Fuses the affine norms of a trained model into adjacent layers.

The command ``python tools/model_converters/fuse.py`` fuses the norms of a config and a checkpoint.
"""

import copy
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import nn

from mmdtn.backbones.base import Backbone
from mmdtn.backbones.folding import NotExact, affine, fold_into, replace
from mmdtn.norms import DTN, TokenNorm
from mmdtn.norms.base import TORCHS_BATCH_AND_INSTANCE_NORMS
from mmdtn.registry import package_of


class FusedNorm(NamedTuple):
    """Outcome for one norm: the layer that it was fused into, or the reason why it was not fused."""

    name: str
    kind: str
    into: str = ''
    why: str = ''


def fuse(model: nn.Module) -> tuple[Any, list[FusedNorm]]:
    """Fuses the norms of a model. Returns the fused copy, and for each norm whether it was fused.

    The model is a backbone, a classifier or a detector. A norm that is affine in evaluation mode is fused into the next
    layers if the outputs stay the same for every image size. Other norms stay unchanged.

    Example:
        >>> norms = dict(norm_cfg=dict(type='BN'), other_norm_cfg=dict(type='BN'))
        >>> fused, outcomes = fuse(PVTDTN('tiny', **norms))
        >>> outcomes[0]
        FusedNorm(name='stages.0.patch_embed.norm', kind='TokenBN', into='stages.0.patch_embed.proj', why='')
    """
    model = copy.deepcopy(model)
    model.eval()
    backbones = {name: module for name, module in model.named_modules() if isinstance(module, Backbone)}
    if not backbones:
        raise ValueError(f'{type(model).__name__} has no backbone of mmdtn. Only norms in such backbones can be fused.')
    outcomes = []
    for path, backbone in backbones.items():
        prefix = f'{path}.' if path else ''
        for name, norm in norms_of(backbone):
            into, why = '', ''
            try:
                into = _fuse_norm(model, prefix, backbone, name)
            except NotExact as error:
                why = str(error)
            outcomes.append(FusedNorm(prefix + name, type(norm).__name__, into, why))
    return model, outcomes


def norms_of(backbone: Backbone) -> list[tuple[str, nn.Module]]:
    """Returns the names and modules of all norms of the backbone that are not inside another norm.

    The list starts with the batch norms inside timm's layers.
    """

    def search(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
        if isinstance(module, (TokenNorm, DTN, nn.LayerNorm, TORCHS_BATCH_AND_INSTANCE_NORMS)):
            yield name, module
            return
        for child_name, child in module.named_children():
            yield from search(child, f'{name}.{child_name}' if name else child_name)

    return sorted(search(backbone, ''), key=lambda found: not found[0].endswith('.bn'))


def _fuse_norm(model: nn.Module, prefix: str, backbone: Backbone, name: str) -> str:
    """Fuses one norm. Returns the name of the layer that it was fused into."""
    if name in backbone.fusible_norms():
        return prefix + backbone.fuse_norm(name)
    a, b = affine(backbone.get_submodule(name))
    if name != backbone.last_norm:
        raise NotExact('its output leaves the backbone, or a convolution pads it with zeros')
    classifier = _first_layer_of_head(model)
    if prefix != 'backbone.' or not classifier:
        raise NotExact('its output leaves the backbone, but a linear classifier of MMPretrain does not follow')
    layer: Any = model.get_submodule(classifier)
    fold_into(layer, a, b)
    replace(backbone, name, nn.Identity())
    return classifier


def _first_layer_of_head(model: nn.Module) -> str:
    """Returns the name of the linear layer that directly follows the backbone of an MMPretrain classifier, or ''."""
    if package_of(type(model)) != 'mmpretrain' or getattr(model, 'with_neck', False):
        return ''
    from mmpretrain.models.heads import LinearClsHead, VisionTransformerClsHead

    head: Any = model.head
    if type(head) is LinearClsHead:
        return 'head.fc'
    if type(head) is VisionTransformerClsHead and head.hidden_dim is None:
        return 'head.layers.head'
    return ''
