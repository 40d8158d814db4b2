"""Builds norms from a ``norm_cfg`` and from their place in a model.

``type='DTN'``, ``type='mmengine.DTN'`` and ``type=DTN`` select the same class. In a norm class, ``FROM_PLACE`` lists
the fields of :class:`Place` that become arguments, unless the ``norm_cfg`` sets them.
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

# MM packages register channels-first classes under the first three names. Fusion replaces a norm by Identity.
SIBLINGS: dict[str, type[nn.Module]] = {'BN': TokenBN, 'IN': TokenIN, 'GN': TokenGN, 'Identity': nn.Identity}
CHANNELS_FIRST = (
    TORCHS_BATCH_AND_INSTANCE_NORMS,
    nn.GroupNorm,
)


class Place(NamedTuple):
    """Arguments that a block passes to its norms."""

    num_heads: int = 1
    pool_size: int = 1
    eps: float = 1e-5
    position_init: str = 'local'

    @property
    def num_groups(self) -> int:
        """GroupNorm's name for the number of heads."""
        return self.num_heads


ANYWHERE = Place()


def build_norm(cfg: dict[str, Any] | None, channels: int, place: Place = ANYWHERE) -> nn.Module:
    """Builds a norm for the last dimension of ``B x H x W x C`` or ``B x T x C``. None gives the identity.

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
        raise ValueError(
            f'norm_cfg has requires_grad={requires_grad!r}, but should have True, or False to freeze the norm.'
        )
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
    """Translates settings of DTN in configs and checkpoints of version 0.3 and older."""
    fixed = {} if options.get('mix_mean', True) else dict(mean_lambda=1.0)
    return {name: value for name, value in options.items() if name not in ('compiled', 'mix_mean')} | fixed


def _takes_channels_last(norm: nn.Module, channels: int) -> bool:
    """Runs the norm on a row of three tokens. With a square map, a norm of a different dimension would not fail."""
    tokens, training = torch.zeros(1, 1, 3, channels), norm.training
    try:
        with torch.no_grad():
            return norm.eval()(tokens).shape == tokens.shape
    except Exception:  # other packages' norms may raise any error
        return False
    finally:
        norm.train(training)


def _channels_first(cfg: dict[str, Any], norm: type[nn.Module]) -> ValueError:
    return ValueError(
        f'norm_cfg has type={cfg["type"]!r}. {norm.__name__} takes B x C x H x W, but the tokens of this backbone '
        f"have their channels last, B x H x W x C. Choose 'DTN', 'LN' or another norm of the last dimension. The "
        "short names 'BN', 'IN' and 'GN' also select such norms."
    )


def norm_class(cfg: dict[str, Any]) -> type[nn.Module]:
    """Returns the class that the ``type`` of a ``norm_cfg`` selects."""
    if not isinstance(cfg, dict) or 'type' not in cfg:
        raise TypeError(
            f"norm_cfg={cfg!r} should be a dict with a type, such as dict(type='DTN'). In --cfg-options, write "
            'norm_cfg.type=DTN.'
        )
    kind = cfg['type']
    if isinstance(kind, str):
        found = LayerNorm if kind.rpartition('.')[2] == 'LN' else SIBLINGS.get(kind) or MODELS.get(kind)
        if found is None:
            raise ValueError(f"norm_cfg has type={kind!r}, which is not registered. Try 'DTN' or 'LN'.")
        kind = found
    if kind is nn.LayerNorm:
        return LayerNorm
    # A subclass with its own forward may take channels last.
    if issubclass(kind, CHANNELS_FIRST) and kind.forward.__module__.startswith('torch.'):
        raise _channels_first(cfg, kind)
    return kind


def needs_grid(cfg: dict[str, Any]) -> bool:
    """Returns whether the norm needs the position of each token on the grid. A class token has none."""
    return getattr(norm_class(cfg), 'NEEDS_GRID', False)
