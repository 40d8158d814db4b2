"""Batch normalisation of tokens: TokenBN, RepBN and PRepBN."""

import torch
from mmengine.registry import MODELS
from torch import Tensor, nn

from .batch_statistics import BatchStatisticsNorm, TaperingNorm


@MODELS.register_module()
class TokenBN(BatchStatisticsNorm):
    """BatchNorm over all tokens of a batch, including class tokens. ``norm_cfg=dict(type='BN')`` selects it.

    Example:
        >>> TokenBN(64)(torch.randn(2, 25, 42, 64)).shape
        torch.Size([2, 25, 42, 64])
    """

    def __init__(self, num_features: int, eps: float = 1e-5, momentum: float | None = 0.1) -> None:
        super().__init__(num_features, eps)
        self.momentum = momentum
        # The batch norm is a submodule, because mmengine's sync_bn replaces subclasses without keeping their reshape.
        self.bn = nn.BatchNorm1d(num_features, eps, momentum)

    def normalise(self, x: Tensor) -> Tensor:
        return self.bn(x.reshape(-1, self.num_features)).view(x.shape)

    def as_affine(self) -> tuple[Tensor, Tensor]:
        """Returns ``(a, b)`` such that ``y = a x + b`` in evaluation mode."""
        bn = self.bn
        assert bn.running_mean is not None and bn.running_var is not None
        a = bn.weight * (bn.running_var + bn.eps).rsqrt()
        return a, bn.bias - a * bn.running_mean


@MODELS.register_module()
class RepBN(TokenBN):
    """Computes ``BN(x) + eta x``. The scalar ``eta`` is learned and starts at 1 (SLAB, arXiv 2405.11582).

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
    """Computes ``rho LN(x) + (1 - rho) RepBN(x)``, where rho falls from 1 to 0 over ``taper_iters`` steps (SLAB).

    Evaluation uses the current rho. The published code always evaluates only RepBN.

    Example:
        >>> PRepBN(64, taper_iters=1000)(torch.randn(2, 25, 42, 64)).shape
        torch.Size([2, 25, 42, 64])
    """

    def __init__(
        self, num_features: int, eps: float = 1e-5, momentum: float | None = 0.1, taper_iters: int = 300_000
    ) -> None:
        super().__init__(num_features, eps, momentum)
        if not isinstance(taper_iters, int) or taper_iters < 1:
            raise ValueError(f'taper_iters={taper_iters!r} should be at least 1 training step. Or choose RepBN.')
        self.prepare_taper(taper_iters)

    def normalise(self, x: Tensor) -> Tensor:
        rho = self.rho()
        if self.training:
            self.count = self.count + 1  # not in place: compiled code recomputes rho in the backward pass
        return self.taper(x, super().normalise(x), rho)

    def as_affine(self) -> tuple[Tensor, Tensor]:
        self.check_tapered()
        return super().as_affine()
