"""Unified Normalization (Yang et al., arXiv 2208.01313), as in the authors' code."""

from typing import Any

import torch
from mmengine.registry import MODELS
from torch import Tensor
from torch.autograd.function import once_differentiable

from .base import in_full_precision
from .batch_statistics import MovingAverageNorm, batch_mean


@MODELS.register_module()
class UN(MovingAverageNorm):
    r"""Divides each channel by its root mean square over recent batches. Evaluation is an affine map.

    ``v`` is the mean square of each channel over all tokens of the batch. ``V`` is the variance of all square roots in
    the window before ``v`` enters it. Training step t computes::

        an outlier, from step warm-up on: mean(window) - geometric_mean(window) > M V in any channel
            phi takes the place of v in the window; skipped += 1
        s = v during warm-up and for an outlier, otherwise geometric_mean(window)
        y = weight * z + bias       z = x / sqrt(s + eps)
        r = 1 up to step max(1000, warm-up) and for an outlier, otherwise sqrt((s + eps) / (phi + eps)) in [1/5, 5]
        phi <- m phi + (1 - m) s

        h = dy * weight * r;  a = mean(h z) enters the gradients' window (psi does for an outlier)
        k = a during warm-up and for an outlier, otherwise mean(gradients' window)
        psi <- m psi + (1 - m) k
        dx = (h - z (k for an outlier, otherwise psi)) / sqrt(s + eps);  dweight = sum(dy r z)

    As in the published code, but not in the paper, ``V`` is the variance over all channels together. With one ``V`` per
    channel, no batch would be an outlier. If channels are alike, most batches are. ``skipped`` counts outliers.

    Args:
        num_features: Channels, C.
        eps: Added to mean squares.
        momentum: Weight m of the previous value in the averages.
        window: Number M of batches that the forward pass averages. With 1, each batch is normalised by itself.
        grad_window: Number of batches that the backward pass averages.
        warmup_iters: Number of steps before averaging starts, at least ``window``.
        outlier_filter: Whether to filter outliers. The authors do so for images, but not for text.
        sync: Whether to compute statistics over the batches of all processes in distributed training.

    Example:
        >>> UN(64)(torch.randn(2, 25, 42, 64)).shape
        torch.Size([2, 25, 42, 64])
    """

    phi: Tensor
    psi: Tensor
    squares: Tensor
    grads: Tensor
    skipped: Tensor

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float = 0.9,
        window: int = 4,
        grad_window: int = 4,
        warmup_iters: int = 4000,
        outlier_filter: bool = True,
        sync: bool = True,
    ) -> None:
        super().__init__(num_features, eps, warmup_iters)
        if min(window, grad_window) < 1:
            raise ValueError(
                f'window={window} and grad_window={grad_window} are numbers of batches and should be at least 1.'
            )
        if warmup_iters < window:
            raise ValueError(
                f'warmup_iters={warmup_iters} should be at least window={window}, because the window must be full when '
                'the warm-up ends.'
            )
        self.momentum, self.window, self.grad_window = momentum, window, grad_window
        self.outlier_filter, self.sync = outlier_filter, sync
        self.register_buffer('phi', torch.ones(num_features))
        self.register_buffer('psi', torch.zeros(num_features))
        self.register_buffer('squares', torch.zeros(window, num_features))
        self.register_buffer('grads', torch.zeros(grad_window, num_features))
        self.register_buffer('skipped', torch.zeros((), dtype=torch.int64))

    def normalise(self, x: Tensor) -> Tensor:
        x = in_full_precision(x)
        if self.training:
            return self._train_step(x)
        a, b = self.as_affine()
        return torch.addcmul(b.to(x), x, a.to(x))

    def as_affine(self) -> tuple[Tensor, Tensor]:
        """Returns ``(a, b)`` such that ``y = a x + b`` in evaluation mode."""
        return self.weight * (self.phi + self.eps).rsqrt(), self.bias

    @torch.compiler.disable
    def _train_step(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            v = batch_mean(x.square().flatten(0, -2).sum(0), x[..., 0].numel(), self.sync)
            self.count += 1
            t = self.count.clone()  # gradient accumulation changes the count before the backward pass
            phi, skip = self.phi.to(x), self._enters_window(v, t)
            own = (t <= self.window) | (t < self.warmup_iters) | skip
            s = torch.where(own, v, self.squares.to(x).log().mean(0).exp())
            r = ((s + self.eps) / (phi + self.eps)).sqrt().clamp(1 / 5, 5)
            r = torch.where((t <= max(1000, self.warmup_iters)) | skip, torch.ones_like(r), r)
            self.phi.copy_(self.momentum * phi + (1 - self.momentum) * s)
        return _Unified.apply(x, self.weight.to(x), self.bias.to(x), (s + self.eps).rsqrt(), r, skip, t, self)

    def _enters_window(self, v: Tensor, t: Tensor) -> Tensor:
        """Puts the batch into the window. Returns whether the batch is normalised by itself."""
        variance = self.squares.sqrt().var()
        row = (t % self.window)[None]
        self.squares.index_copy_(0, row, v.to(self.squares)[None])
        outlier = torch.zeros_like(t, dtype=torch.bool)
        if self.outlier_filter:
            gap = self.squares.mean(0) - self.squares.log().mean(0).exp()
            outlier = (t >= self.warmup_iters) & (gap > self.window * variance).any()
            self.squares.index_copy_(0, row, torch.where(outlier, self.phi, self.squares.index_select(0, row)))
            self.skipped += outlier
        return outlier | (self.window == 1)


class _Unified(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, scale: Tensor, *rest: Any) -> Tensor:
        r, skip, t, ctx.norm = rest
        ctx.save_for_backward(x, weight, scale, r, skip, t)
        return torch.addcmul(bias, x, weight * scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale, r, skip, t = ctx.saved_tensors
        norm = ctx.norm
        product = g * x
        to_weight = product.flatten(0, -2).sum(0) * (r * scale)
        a = weight * batch_mean(to_weight, g[..., 0].numel(), norm.sync)
        psi, row = norm.psi.to(x), (t % norm.grad_window)[None]
        finite = a.isfinite().all()  # an overflow would stay in the averages forever
        entry = torch.where(finite, torch.where(skip, psi, a).to(norm.grads), norm.grads.index_select(0, row))
        norm.grads.index_copy_(0, row, entry)
        own = (t <= norm.grad_window) | (t < norm.warmup_iters) | skip
        k = torch.where(own, a, norm.grads.mean(0).to(x))
        psi = torch.where(finite, norm.momentum * psi + (1 - norm.momentum) * k, psi)
        norm.psi.copy_(psi)
        to_x = None
        if ctx.needs_input_grad[0]:
            pull = torch.where(skip, k, psi)
            to_x = torch.mul(g, weight * r * scale, out=product).addcmul_(x, -pull * scale.square())
        return to_x, to_weight, g.flatten(0, -2).sum(0), *[None] * 5
