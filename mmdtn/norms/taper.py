"""A LayerNorm in front of a norm of batches, whose share falls to nothing while training goes on."""

import torch
from torch import Tensor, nn

from .base import BatchStatisticsNorm


class TaperingNorm(BatchStatisticsNorm):
    """``rho LN(x) + (1 - rho) y``: rho falls from 1 to 0 over ``taper_iters`` training steps, which ``count`` counts.

    Evaluation takes rho as it is.
    """

    count: Tensor
    taper_iters: int

    def prepare_taper(self, taper_iters: int) -> None:
        self.taper_iters = taper_iters
        self.repeatable = not taper_iters
        self.ln = nn.LayerNorm(self.num_features, eps=1e-6) if taper_iters else None
        self.register_buffer('count', torch.zeros((), dtype=torch.int64))

    def rho(self) -> Tensor:
        """LayerNorm's share, a tensor."""
        return (1 - self.count / max(self.taper_iters, 1)).clamp(min=0)

    def taper(self, x: Tensor, y: Tensor, rho: Tensor) -> Tensor:
        return y if self.ln is None else torch.lerp(y, self.ln(x).to(y.dtype), rho.to(y.dtype))

    def check_tapered(self) -> None:
        if self.count < self.taper_iters:
            raise RuntimeError(
                f'{type(self).__name__} is affine from taper_iters={self.taper_iters} training steps on, but has made '
                f'{int(self.count)}: LayerNorm still has a share in it.'
            )
