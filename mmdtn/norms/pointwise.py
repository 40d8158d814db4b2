"""Pointwise functions that replace normalisation: DyT and Derf."""

import torch
from mmengine.registry import MODELS
from torch import Tensor, nn

from .base import TokenNorm, in_full_precision


@MODELS.register_module()
class DyT(TokenNorm):
    """Computes ``weight tanh(alpha x) + bias``. The scalar ``alpha`` is learned and starts at 1/2 (arXiv 2503.10622).

    ``eps`` has no effect, but builders of MM packages pass it.

    Example:
        >>> DyT(64)(torch.randn(2, 25, 42, 64)).shape
        torch.Size([2, 25, 42, 64])
    """

    def __init__(self, num_features: int, eps: float = 1e-5) -> None:
        super().__init__(num_features, eps)
        self.weight = nn.Parameter(torch.ones(num_features))
        self.bias = nn.Parameter(torch.zeros(num_features))
        self.alpha = nn.Parameter(torch.full((1,), 0.5))

    def normalise(self, x: Tensor) -> Tensor:
        x = in_full_precision(x)
        return torch.addcmul(self.bias.to(x), torch.tanh(x * self.alpha.to(x)), self.weight.to(x))


@MODELS.register_module()
class Derf(DyT):
    """Computes ``weight erf(alpha x + shift) + bias``. The scalar ``shift`` starts at 0 (arXiv 2512.10938).

    Example:
        >>> Derf(64)(torch.randn(2, 25, 42, 64)).shape
        torch.Size([2, 25, 42, 64])
    """

    def __init__(self, num_features: int, eps: float = 1e-5) -> None:
        super().__init__(num_features, eps)
        self.shift = nn.Parameter(torch.zeros(1))

    def normalise(self, x: Tensor) -> Tensor:
        x = in_full_precision(x)
        inner = torch.addcmul(self.shift.to(x), x, self.alpha.to(x))
        return torch.addcmul(self.bias.to(x), torch.erf(inner), self.weight.to(x))
