"""Batch normalisation of tokens, alone and with a part of its input (RepBN, PRepBN)."""

import torch
from mmengine.registry import MODELS
from torch import Tensor, nn

from .batch_statistics import BatchStatisticsNorm, TaperingNorm


@MODELS.register_module()
class TokenBN(BatchStatisticsNorm):
    """BatchNorm: each channel over all tokens of the batch, a class token too; ``norm_cfg=dict(type='BN')``.

    Example:
        >>> TokenBN(64)(torch.randn(2, 25, 42, 64)).shape
        torch.Size([2, 25, 42, 64])
    """

    def __init__(self, num_features: int, eps: float = 1e-5, momentum: float | None = 0.1) -> None:
        super().__init__(num_features, eps)
        self.momentum = momentum
        # As a part: mmengine's sync_bn replaces a batch norm by its class, and would lose the reshape of a subclass.
        self.bn = nn.BatchNorm1d(num_features, eps, momentum)

    def normalise(self, x: Tensor) -> Tensor:
        return self.bn(x.reshape(-1, self.num_features)).view(x.shape)

    def as_affine(self) -> tuple[Tensor, Tensor]:
        """``(a, b)`` with ``y = a x + b`` in evaluation mode."""
        bn = self.bn
        assert bn.running_mean is not None and bn.running_var is not None
        a = bn.weight * (bn.running_var + bn.eps).rsqrt()
        return a, bn.bias - a * bn.running_mean


@MODELS.register_module()
class RepBN(TokenBN):
    """``BN(x) + eta x`` with one learned ``eta``, from 1 (SLAB, arXiv 2405.11582).

    Example:
        >>> RepBN(64)(torch.randn(2, 25, 42, 64)).shape
        torch.Size([2, 25, 42, 64])
    """

    def __init__(self, num_features: int, eps: float = 1e-5, momentum: float | None = 0.1) -> None:
        super().__init__(num_features, eps, momentum)
        self.eta = nn.Parameter(torch.ones(1))

    def normalise(self, x: Tensor) -> Tensor:
        return torch.addcmul(super().normalise(x), x, self.eta.to(x.dtype))

    def as_affine(self) -> tuple[Tensor, Tensor]:
        a, b = super().as_affine()
        return a + self.eta, b


@MODELS.register_module()
class PRepBN(RepBN, TaperingNorm):
    """``rho LN(x) + (1 - rho) RepBN(x)``: rho falls from 1 to 0 over ``taper_iters`` training steps (SLAB).

    Evaluation takes rho as it is; the published code evaluates RepBN alone from the first step on.

    Example:
        >>> PRepBN(64, taper_iters=1000)(torch.randn(2, 25, 42, 64)).shape
        torch.Size([2, 25, 42, 64])
    """

    def __init__(
        self, num_features: int, eps: float = 1e-5, momentum: float | None = 0.1, taper_iters: int = 300_000
    ) -> None:
        super().__init__(num_features, eps, momentum)
        if not isinstance(taper_iters, int) or taper_iters < 1:
            raise ValueError(f'taper_iters={taper_iters!r}: give training steps, from 1 on, or choose RepBN.')
        self.prepare_taper(taper_iters)

    def normalise(self, x: Tensor) -> Tensor:
        rho = self.rho()
        if self.training:
            self.count = self.count + 1  # not in place: compiled code computes rho from it again in the backward pass
        return self.taper(x, super().normalise(x), rho)

    def as_affine(self) -> tuple[Tensor, Tensor]:
        self.check_tapered()
        return super().as_affine()
