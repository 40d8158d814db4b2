"""Statistics of one token: ScaleNorm and RMSNorm."""

import torch
import torch.nn.functional as F
from mmengine.registry import MODELS
from torch import Tensor, nn

from .base import TokenNorm, in_full_precision


@MODELS.register_module()
class RMSNorm(TokenNorm):
    """``weight x / sqrt(mean(x^2) + eps)``, the mean over a token's channels (arXiv 1910.07467): torch's.

    Example:
        >>> RMSNorm(64)(torch.randn(2, 25, 42, 64)).shape
        torch.Size([2, 25, 42, 64])
    """

    def __init__(self, num_features: int, eps: float = 1e-6) -> None:
        super().__init__(num_features, eps)
        self.weight = nn.Parameter(torch.ones(num_features))

    def normalise(self, x: Tensor) -> Tensor:
        x = in_full_precision(x)
        return F.rms_norm(x, (self.num_features,), self.weight.to(x), self.eps)


@MODELS.register_module()
class ScaleNorm(TokenNorm):
    """``weight x / max(|x|, eps)``, the length over a token's channels (arXiv 1910.05895); weight starts at sqrt(C).

    The paper learns one scale; the DTN authors' baseline learns C of them, as ``per_channel`` does.

    Example:
        >>> ScaleNorm(64)(torch.randn(2, 25, 42, 64)).shape
        torch.Size([2, 25, 42, 64])
    """

    def __init__(self, num_features: int, eps: float = 1e-5, per_channel: bool = True) -> None:
        super().__init__(num_features, eps)
        self.per_channel = per_channel
        self.weight = nn.Parameter(torch.full((num_features if per_channel else 1,), num_features**0.5))

    def normalise(self, x: Tensor) -> Tensor:
        return F.normalize(in_full_precision(x), dim=-1, eps=self.eps) * self.weight
