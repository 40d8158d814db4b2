"""Fuses norms into neighbouring layers. A norm can be fused if its evaluation mode is an affine map ``y = a x + b``.

The fusion computes weights in float64, and then converts them to the layer's dtype.
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
    """Raised if fusing a norm would change the output. The report gives the error message as the reason."""


class Neighbour(NamedTuple):
    """A layer that can absorb a norm.

    ``name`` is the layer's name within its module. ``take_in`` fuses the float64 pair ``(a, b)`` into the layer's
    weights, or raises ``NotExact`` and leaves them unchanged.
    """

    name: str
    take_in: Callable[[Tensor, Tensor], None]


class FusesNorms(nn.Module):
    """Base class of modules whose layers can absorb norms. The ``reparameterize_model`` of timm calls ``fuse()``.

    Example:
        >>> from timm.utils import reparameterize_model
        >>> model = ViTDTN('t', norm_cfg=dict(type='BN')).eval()
        >>> reparameterize_model(model).blocks[0].norm1
        Identity()
    """

    def neighbours(self) -> dict[str, Neighbour]:
        """Maps the name of each norm to the layer that can absorb it."""
        raise NotImplementedError

    def fuse(self) -> 'FusesNorms':
        """Fuses each norm whose fusion leaves the output unchanged, and returns the module.

        The fused module must stay in evaluation mode.
        """
        if self.training:
            raise ValueError(
                f'{type(self).__name__} is in training mode, where its norms are not affine. Call model.eval() first.'
            )
        for name in self.neighbours():
            try:
                self.fuse_norm(name)
            except NotExact:
                continue  # keep the norm
        return self

    def fuse_norm(self, name: str) -> None:
        """Fuses one norm and replaces it by ``nn.Identity``, or raises ``NotExact``.

        If the norm is already ``nn.Identity``, outputs stay the same, but the neighbour gets a bias and the border of
        padded maps, as after a fusion.
        """
        self.neighbours()[name].take_in(*affine(self.get_submodule(name)))
        replace(self, name, nn.Identity())


def neighbours(module: nn.Module) -> dict[str, Neighbour]:
    return module.neighbours() if isinstance(module, FusesNorms) else {}


def affine(norm: nn.Module) -> tuple[Tensor, Tensor]:
    """Returns the float64 pair ``(a, b)`` of a norm in evaluation mode."""
    if isinstance(norm, nn.Identity):
        return torch.ones((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    if not hasattr(norm, 'as_affine'):
        raise NotExact(f'{type(norm).__name__} is not an affine map, even in evaluation mode')
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
    """Fuses the batch norm of timm's ``ConvNorm`` or ``LinearNorm`` into its layer. Returns other modules unchanged.

    The ``fuse()`` of timm is not suitable, because it converts every dtype to float32.
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
    """Changes a layer so that it computes ``layer(a x + b)``. Zero padding in a convolution counts as part of ``x``."""
    a, b = a.to(layer.weight.device), b.to(layer.weight.device)
    weight = layer.weight.double()
    of_inputs = weight.flatten(2).sum(-1) if weight.dim() > 2 else weight
    _set(layer, weight * a.reshape(-1, *[1] * (weight.dim() - 2)), _bias(layer) + (of_inputs * b).sum(1))


@torch.no_grad()
def fold_behind(layer: nn.Linear | nn.Conv2d, a: Tensor, b: Tensor) -> None:
    """Changes a layer so that it computes ``a layer(x) + b``."""
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
    """Computes the padding values for a layer that absorbs the norm in front of it.

    The fusion moves padding from the norm's output, where it has the value ``border`` or zero, to the norm's input. The
    new padding values satisfy ``a new + b = border``, so the outputs of ``layer`` stay the same.
    """
    a, b = a.to(layer.weight.device), b.to(layer.weight.device)
    old = b.new_zeros(layer.weight.shape[1]) if border is None else border.double()
    new = torch.where(a == 0, 0.0, (old - b) / a).to(layer.weight.dtype)
    lost = ((a == 0) & (old != b)) | ~new.isfinite()
    if lost.any():
        raise NotExact(
            f'its factor is 0 in channels {lost.nonzero().flatten().tolist()}, so that no padding value in front of it '
            'has the effect of the zeros with which its output is padded'
        )
    return new


def pad(x: Tensor, below: int, right: int, border: Tensor | None) -> Tensor:
    """Pads ``B x H x W x C`` with rows and columns of zeros or of the C values in ``border``."""
    B, H, W, C = x.shape
    if border is None:
        return F.pad(x, (0, 0, 0, right, 0, below))
    padded = border.to(x.dtype).expand(B, H + below, W + right, C).contiguous()
    padded[:, :H, :W] = x
    return padded
