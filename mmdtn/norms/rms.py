"""RMSNorm and ScaleNorm, which divide each token by its root mean square or its length."""

import torch
import torch.nn.functional as F
from mmengine.registry import MODELS
from torch import Tensor, nn

from .base import TokenNorm, in_full_precision


@MODELS.register_module()
class RMSNorm(TokenNorm):
    """Computes ``weight x / sqrt(mean(x^2) + eps)`` over the channels of a token, as torch does (arXiv 1910.07467).

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
    """Computes ``weight x / max(|x|, eps)``, where ``|x|`` is the length of a token (arXiv 1910.05895).

    The weight starts at sqrt(C). The paper learns a single scale. With ``per_channel``, each channel has its own scale,
    as in the DTN authors' baseline.

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
