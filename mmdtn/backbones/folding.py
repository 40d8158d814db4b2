"""Norms that vanish: a norm that is ``y = a x + b`` in evaluation becomes part of a layer in front of it or behind it.

Sums are in float64; the layers keep their dtype.
"""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from timm.models.levit import ConvNorm, LinearNorm
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval, fuse_linear_bn_eval


class NotExact(ValueError):
    """Why a norm has to stay, for the one who reads the report."""


class Neighbour(NamedTuple):
    """What can take a norm in: its name within the module, and how it takes ``(a, b)``, float64, into its weights.

    ``take_in`` raises ``NotExact`` before it changes anything.
    """

    name: str
    take_in: Callable[[Tensor, Tensor], None]


class FusesNorms(nn.Module):
    """A module whose other layers can take in norms. timm's ``reparameterize_model`` finds its ``fuse()``.

    Example:
        >>> from timm.utils import reparameterize_model
        >>> model = ViTDTN('t', norm_cfg=dict(type='BN')).eval()
        >>> reparameterize_model(model).blocks[0].norm1
        Identity()
    """

    def neighbours(self) -> dict[str, Neighbour]:
        """By the name of a norm, the layer that can take it in."""
        raise NotImplementedError

    def fuse(self) -> 'FusesNorms':
        """This module, in evaluation mode for good, with ``nn.Identity`` where that computes the same."""
        if self.training:
            raise ValueError(
                f'{type(self).__name__} is in training mode, where its norms are not affine: model.eval() first.'
            )
        for name in self.neighbours():
            try:
                self.fuse_norm(name)
            except NotExact:
                continue  # it stays
        return self

    def fuse_norm(self, name: str) -> None:
        """Puts ``nn.Identity`` in the place of one norm, or raises ``NotExact``.

        A norm that is ``nn.Identity`` already changes no number, but its neighbour gets what others have after this: a
        bias, and the border of padded maps.
        """
        self.neighbours()[name].take_in(*affine(self.get_submodule(name)))
        replace(self, name, nn.Identity())


def neighbours(module: nn.Module) -> dict[str, Neighbour]:
    return module.neighbours() if isinstance(module, FusesNorms) else {}


def affine(norm: nn.Module) -> tuple[Tensor, Tensor]:
    """``(a, b)`` of a norm in evaluation mode, in float64."""
    if isinstance(norm, nn.Identity):
        return torch.ones((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    if not hasattr(norm, 'as_affine'):
        raise NotExact(f'{type(norm).__name__} depends on its input in evaluation too')
    with torch.no_grad():
        try:
            double: Any = copy.deepcopy(norm).double()
            a, b = double.as_affine()
        except RuntimeError as error:
            raise NotExact(str(error)) from None
    if not (a.isfinite().all() and b.isfinite().all()):
        raise NotExact('its statistics are not finite')
    return a, b


def without_batch_norm(part: nn.Module) -> Any:
    """timm's layer with a batch norm behind it as one layer, or what is none as it is.

    timm's own ``fuse()`` makes float32 of any dtype.
    """
    if not isinstance(part, (ConvNorm, LinearNorm)):
        return part
    double: Any = copy.deepcopy(part).double().eval()
    fuse: Any = fuse_conv_bn_eval if isinstance(part, ConvNorm) else fuse_linear_bn_eval
    return fuse(double.linear, double.bn).to(part.linear.weight.dtype)


def replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition('.')
    setattr(model.get_submodule(parent), child, module)


@torch.no_grad()
def fold_into(layer: nn.Linear | nn.Conv2d, a: Tensor, b: Tensor) -> None:
    """``layer(a x + b)`` as ``layer(x)``; zeros that a convolution pads count as ``x``."""
    a, b = a.to(layer.weight.device), b.to(layer.weight.device)
    weight = layer.weight.double()
    of_inputs = weight.flatten(2).sum(-1) if weight.dim() > 2 else weight
    _set(layer, weight * a.reshape(-1, *[1] * (weight.dim() - 2)), _bias(layer) + (of_inputs * b).sum(1))


@torch.no_grad()
def fold_behind(layer: nn.Linear | nn.Conv2d, a: Tensor, b: Tensor) -> None:
    """``a layer(x) + b`` as ``layer(x)``."""
    a, b = a.to(layer.weight.device), b.to(layer.weight.device)
    weight = layer.weight.double()
    _set(layer, weight * a.reshape(-1, *[1] * (weight.dim() - 1)), _bias(layer) * a + b)


def _bias(layer: nn.Linear | nn.Conv2d) -> Tensor:
    return layer.weight.new_zeros(len(layer.weight), dtype=torch.float64) if layer.bias is None else layer.bias.double()


def _set(layer: nn.Linear | nn.Conv2d, weight: Tensor, bias: Tensor) -> None:
    if layer.bias is None:
        layer.bias = nn.Parameter(torch.empty_like(bias, dtype=layer.weight.dtype))
    layer.weight.copy_(weight)
    layer.bias.copy_(bias)


def border_in_front(layer: nn.Linear | nn.Conv2d, border: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """What to pad in front of ``layer``, once it has taken in a norm, where ``border`` or zeros were padded behind it.

    ``a border' + b = border``, so that ``layer`` finds there what it always did.
    """
    a, b = a.to(layer.weight.device), b.to(layer.weight.device)
    old = b.new_zeros(layer.weight.shape[1]) if border is None else border.double()
    new = torch.where(a == 0, 0.0, (old - b) / a).to(layer.weight.dtype)
    lost = ((a == 0) & (old != b)) | ~new.isfinite()
    if lost.any():
        raise NotExact(
            f'its factor is 0 in channels {lost.nonzero().flatten().tolist()}: no padding in front of the layer behind '
            'it stands for the zeros that a map is padded with'
        )
    return new


def pad(x: Tensor, below: int, right: int, border: Tensor | None) -> Tensor:
    """``B x H x W x C`` with more rows and columns of zeros, or of the ``border``'s C numbers."""
    B, H, W, C = x.shape
    if border is None:
        return F.pad(x, (0, 0, 0, right, 0, below))
    padded = border.to(x.dtype).expand(B, H + below, W + right, C).contiguous()
    padded[:, :H, :W] = x
    return padded
