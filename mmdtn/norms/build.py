"""From a ``norm_cfg`` and a place in a model to a module.

A norm is found by its class, so that ``type='DTN'``, ``type='mmengine.DTN'`` and ``type=DTN`` are the same. What it
takes from its place unless the ``norm_cfg`` says otherwise stands in its class as ``FROM_PLACE``: names of ``Place``.
"""

from typing import Any, NamedTuple

import torch
from mmengine.registry import MODELS
from torch import nn

from .base import TORCHS_BATCH_AND_INSTANCE_NORMS, check_values
from .batch import TokenBN
from .dtn import DTN
from .image import TokenGN, TokenIN
from .layer import LayerNorm

# MM registers channels-first classes under the first three names. Identity is what fusing leaves of a norm.
SIBLINGS: dict[str, type[nn.Module]] = {'BN': TokenBN, 'IN': TokenIN, 'GN': TokenGN, 'Identity': nn.Identity}
CHANNELS_FIRST = (
    TORCHS_BATCH_AND_INSTANCE_NORMS,
    nn.GroupNorm,
)


class Place(NamedTuple):
    """What a block knows that a norm may want."""

    num_heads: int = 1
    pool_size: int = 1
    eps: float = 1e-5
    position_init: str = 'local'

    @property
    def num_groups(self) -> int:
        """The heads, as GroupNorm calls them."""
        return self.num_heads


ANYWHERE = Place()


def build_norm(cfg: dict[str, Any] | None, channels: int, place: Place = ANYWHERE) -> nn.Module:
    """A normaliser of the last dimension of ``B x H x W x C`` or ``B x T x C``; of None, the identity.

    As in MMDetection, ``requires_grad=False`` in ``cfg`` freezes the parameters of any norm.

    Example:
        >>> build_norm(dict(type='DTN'), 64, Place(num_heads=4, pool_size=2))
        DTN(64, num_heads=4, pool_size=2)
    """
    if cfg is None:
        return nn.Identity()
    norm = norm_class(cfg)
    options = {name: getattr(place, name) for name in getattr(norm, 'FROM_PLACE', ())} | cfg
    if issubclass(norm, DTN):
        options = _without_retired(options)
    requires_grad = options.pop('requires_grad', True)
    if not isinstance(requires_grad, bool):
        raise ValueError(f'norm_cfg has requires_grad={requires_grad!r}: give True, or False to freeze the norm.')
    options = {name: value for name, value in options.items() if name != 'type'}
    known = norm.__module__.partition('.')[0] in ('torch', 'mmdtn')
    if known:
        check_values(norm, options)
    module = norm(channels, **options)
    if not requires_grad:
        module.requires_grad_(False)
    if not known and not _takes_channels_last(module, channels):
        raise _channels_first(cfg, norm)
    return module


def _without_retired(options: dict[str, Any]) -> dict[str, Any]:
    """Translates settings of DTN that configs, and checkpoints with configs, have up to version 0.3."""
    fixed = {} if options.get('mix_mean', True) else dict(mean_lambda=1.0)
    return {name: value for name, value in options.items() if name not in ('compiled', 'mix_mean')} | fixed


def _takes_channels_last(norm: nn.Module, channels: int) -> bool:
    """Tried on a row of three tokens. On a square map a norm of another dimension would pass, and normalise that."""
    tokens, training = torch.zeros(1, 1, 3, channels), norm.training
    try:
        with torch.no_grad():
            return norm.eval()(tokens).shape == tokens.shape
    except Exception:  # of whatever kind other people's norms raise
        return False
    finally:
        norm.train(training)


def _channels_first(cfg: dict[str, Any], norm: type[nn.Module]) -> ValueError:
    return ValueError(
        f'norm_cfg has type={cfg["type"]!r}: {norm.__name__} takes B x C x H x W, but the tokens of this backbone '
        f"have their channels last, B x H x W x C. Choose 'DTN', 'LN' or another norm of the last dimension; the "
        "short names 'BN', 'IN' and 'GN' stand for such norms."
    )


def norm_class(cfg: dict[str, Any]) -> type[nn.Module]:
    """The class that the ``type`` of a ``norm_cfg`` names."""
    if not isinstance(cfg, dict) or 'type' not in cfg:
        raise TypeError(
            f"norm_cfg={cfg!r} is no dict with a type, as dict(type='DTN'); in --cfg-options, norm_cfg.type=DTN"
        )
    kind = cfg['type']
    if isinstance(kind, str):
        found = LayerNorm if kind.rpartition('.')[2] == 'LN' else SIBLINGS.get(kind) or MODELS.get(kind)
        if found is None:
            raise ValueError(f"norm_cfg has type={kind!r}, which nothing registered. Try 'DTN' or 'LN'.")
        kind = found
    if kind is nn.LayerNorm:
        return LayerNorm
    # A subclass with a forward of its own may take channels last.
    if issubclass(kind, CHANNELS_FIRST) and kind.forward.__module__.startswith('torch.'):
        raise _channels_first(cfg, kind)
    return kind


def needs_grid(cfg: dict[str, Any]) -> bool:
    """Whether the norm must know each token's place on the grid, which a class token does not have."""
    return getattr(norm_class(cfg), 'NEEDS_GRID', False)
