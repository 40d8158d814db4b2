"""Instance and group normalisation of tokens, based on the statistics of one image."""

import torch
import torch.nn.functional as F
from mmengine.registry import MODELS
from torch import Tensor, nn

from .base import TokenNorm, check_groups, check_more_than_one
from .lengths import Groups, for_each_length


@MODELS.register_module()
class TokenIN(TokenNorm):
    """InstanceNorm over the tokens of an image. ``norm_cfg=dict(type='IN')`` selects it.

    ``unbiased`` divides the variance by T - 1, as the DTN authors' code does.

    Example:
        >>> TokenIN(64)(torch.randn(2, 25, 42, 64)).shape
        torch.Size([2, 25, 42, 64])
    """

    FEWEST_DIMENSIONS = 3

    def __init__(self, num_features: int, eps: float = 1e-5, unbiased: bool = False) -> None:
        super().__init__(num_features, eps)
        self.unbiased = unbiased
        self.weight = nn.Parameter(torch.ones(num_features))
        self.bias = nn.Parameter(torch.zeros(num_features))

    def normalise(self, x: Tensor) -> Tensor:
        tokens = x.flatten(1, -2).transpose(0, 1)
        T, B, C = tokens.shape
        weight: Tensor = self.weight
        bias, eps = self.bias, self.eps
        if self.unbiased:
            check_more_than_one(T)
            # For s = (T - 1) / T, the identity var / s + eps = (var + s eps) / s holds.
            share = (T - 1) / T
            weight, eps = weight * share**0.5, eps * share
        # Unlike F.instance_norm, a batch norm of B C channels needs no transposed copy. Unlike F.batch_norm,
        # torch.batch_norm accepts an image with a single token.
        columns, cudnn = tokens.reshape(T, B * C), torch.backends.cudnn.enabled
        y = torch.batch_norm(columns, weight.repeat(B), bias.repeat(B), None, None, True, 0.0, eps, cudnn)
        return y.view(T, B, C).transpose(0, 1).contiguous().view(x.shape)

    def normalise_real(self, tokens: Tensor, groups: Groups) -> Tensor:
        return for_each_length(self.normalise, tokens, groups)


@MODELS.register_module()
class TokenGN(TokenNorm):
    """GroupNorm over the tokens of an image. By default, each head is a group.

    ``norm_cfg=dict(type='GN')`` selects it.

    Example:
        >>> TokenGN(64, num_groups=4)(torch.randn(2, 25, 42, 64)).shape
        torch.Size([2, 25, 42, 64])
    """

    FROM_PLACE = ('num_groups',)
    FEWEST_DIMENSIONS = 3

    def __init__(self, num_features: int, num_groups: int = 1, eps: float = 1e-5) -> None:
        super().__init__(num_features, eps)
        check_groups(self, num_groups)
        self.num_groups = num_groups
        self.weight = nn.Parameter(torch.ones(num_features))
        self.bias = nn.Parameter(torch.zeros(num_features))

    def normalise(self, x: Tensor) -> Tensor:
        # A map in channels-last format makes transposing the tokens unnecessary.
        image = x.flatten(1, -2)[:, None].permute(0, 3, 1, 2)
        y = F.group_norm(image, self.num_groups, self.weight, self.bias, self.eps)
        return y.permute(0, 2, 3, 1).reshape(x.shape)

    def normalise_real(self, tokens: Tensor, groups: Groups) -> Tensor:
        return for_each_length(self.normalise, tokens, groups)
