"""PowerNorm (Shen et al., arXiv 2003.07845) as the DTN authors use it."""

from typing import Any

import torch
from mmengine.registry import MODELS
from torch import Tensor
from torch.autograd.function import once_differentiable

from .base import check_groups, in_full_precision
from .batch_statistics import MovingAverageNorm, batch_mean


@MODELS.register_module()
class PowerNorm(MovingAverageNorm):
    r"""Divides each channel group by its root mean square, and then each channel by that of recent batches.

    ``u`` is a token after the first division. ``phi_B`` is the mean of ``u^2`` over all tokens of the batch. Training
    step t computes::

        y = weight * z + bias       z = u / sqrt((phi_B if t <= warm-up else phi) + eps)
        if t < warm-up:  phi <- phi (t - 1) / t + phi_B / t
        phi <- alpha_fwd phi + (1 - alpha_fwd) phi_B

        d = dy * weight - (1 - alpha_bwd) nu z
        du = d / sqrt(q + eps)      nu <- nu + mean(d z)

    ``dy``, ``d`` and ``du`` are gradients. The forward pass also depends on earlier batches, so these gradients are not
    exact. ``nu`` approximates the influence of earlier batches.

    Args:
        num_features: Channels, C.
        num_groups: Number of channel groups. Backbones pass their number of heads.
        eps: Added to both mean squares.
        alpha_fwd: Weight of the previous value in ``phi``.
        alpha_bwd: Weight of the previous value in ``nu``.
        warmup_iters: Number of steps that use the statistics of their own batch.
        q: Mean square in the gradient. ``'running'`` uses the updated ``phi`` from step ``warmup_iters`` on, as the DTN
            authors' code does. ``'batch'`` always uses ``phi_B``, as PowerNorm's own code does.
        sync: Whether to compute statistics over the batches of all processes in distributed training.

    Example:
        >>> PowerNorm(64, num_groups=4)(torch.randn(2, 25, 42, 64)).shape
        torch.Size([2, 25, 42, 64])
    """

    FROM_PLACE = ('num_groups',)
    phi: Tensor
    nu: Tensor

    def __init__(
        self,
        num_features: int,
        num_groups: int = 1,
        eps: float = 1e-5,
        alpha_fwd: float = 0.9,
        alpha_bwd: float = 0.9,
        warmup_iters: int = 10_000,
        q: str = 'running',
        sync: bool = True,
    ) -> None:
        super().__init__(num_features, eps, warmup_iters)
        check_groups(self, num_groups)
        if q not in ('running', 'batch'):
            raise ValueError(f"q={q!r}: choose 'running' or 'batch'.")
        self.num_groups, self.alpha_fwd, self.alpha_bwd = num_groups, alpha_fwd, alpha_bwd
        self.q, self.sync = q, sync
        self.register_buffer('phi', torch.ones(num_features))
        self.register_buffer('nu', torch.zeros(num_features))

    def normalise(self, x: Tensor) -> Tensor:
        if self.training:
            return self._train_step(in_full_precision(x))
        u = by_group(x := in_full_precision(x), inverse_rms(x, self.num_groups, self.eps))
        return torch.addcmul(self.bias.to(x), u, self.weight.to(x) * (self.phi.to(x) + self.eps).rsqrt())

    @torch.compiler.disable
    def _train_step(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            inverse = inverse_rms(x, self.num_groups, self.eps)
            u = by_group(x, inverse)
            of_batch = batch_mean(u.square().flatten(0, -2).sum(0), u[..., 0].numel(), self.sync)
            self.count += 1
            t, phi = self.count, self.phi.to(x)
            p = torch.where(t <= self.warmup_iters, of_batch, phi)
            phi = torch.where(t < self.warmup_iters, phi + (of_batch - phi) / t, phi)
            phi = self.alpha_fwd * phi + (1 - self.alpha_fwd) * of_batch
            self.phi.copy_(phi)
            q = torch.where(t < self.warmup_iters, of_batch, phi) if self.q == 'running' else of_batch
            # The scales are copies, because the buffers change before the backward pass under gradient accumulation.
            scales = (p + self.eps).rsqrt(), (q + self.eps).rsqrt(), of_batch
        return _Power.apply(x, self.weight.to(x), self.bias.to(x), u, inverse, *scales, self)


class _Power(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, u: Tensor, inverse: Tensor, *rest: Any) -> Tensor:
        forward_scale, backward_scale, of_batch, ctx.norm = rest
        ctx.save_for_backward(x, weight, inverse, forward_scale, backward_scale, of_batch)
        return torch.addcmul(bias, u, weight * forward_scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, inverse, scale, backward_scale, of_batch = ctx.saved_tensors
        norm = ctx.norm
        u, nu = by_group(x, inverse), norm.nu.to(x)
        product = g * u
        to_weight = product.flatten(0, -2).sum(0) * scale  # the sum of g z; the mean of z^2 is scale^2 of_batch
        pull = (1 - norm.alpha_bwd) * nu
        mean_gz = batch_mean(to_weight, g[..., 0].numel(), norm.sync)
        moved = nu + weight * mean_gz - pull * scale.square() * of_batch
        norm.nu.copy_(torch.where(moved.isfinite().all(), moved, nu))  # an overflow would remain forever
        to_x = None
        if ctx.needs_input_grad[0]:
            to_x = torch.mul(g, weight * backward_scale, out=product)
            to_x.addcmul_(u, -pull * scale * backward_scale)
            du, u = (t.unflatten(-1, (norm.num_groups, -1)) for t in (to_x, u))
            along = (du * u).mean(-1, keepdim=True)
            du.addcmul_(u, along, value=-1).mul_(inverse)
        return to_x, to_weight, g.flatten(0, -2).sum(0), *[None] * 6


def inverse_rms(x: Tensor, num_groups: int, eps: float) -> Tensor:
    """Returns the inverse root mean square of each group in each token, of shape ``... x G x 1``."""
    groups = x.unflatten(-1, (num_groups, -1))
    return (torch.linalg.vector_norm(groups, dim=-1, keepdim=True).square() / groups.shape[-1] + eps).rsqrt()


def by_group(x: Tensor, factor: Tensor) -> Tensor:
    """Multiplies each group of ``x`` by its own factor. The factors have the shape ``... x G x 1``."""
    return (x.unflatten(-1, (factor.shape[-2], -1)) * factor).flatten(-2)
