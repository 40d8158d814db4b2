"""Switchable Normalization (Luo et al., arXiv 1806.10779) of tokens."""

import torch
from mmengine.registry import MODELS
from torch import Tensor, nn

from .base import check_more_than_one, in_full_precision
from .batch_statistics import BatchStatisticsNorm, batch_mean
from .lengths import Groups, by_length


@MODELS.register_module()
class SN(BatchStatisticsNorm):
    r"""Mixes the statistics of InstanceNorm, LayerNorm and BatchNorm with learned weights::

        y   = weight * (x - mu) / sqrt(var + eps) + bias
        mu  = w1 mu_in + w2 mu_ln + w3 mu_bn       w = softmax(mean_weight)
        var = v1 var_in + v2 var_ln + v3 var_bn    v = softmax(var_weight)

    Args:
        num_features: Channels, C.
        eps: Added to the variance.
        momentum: Weight of the new batch in the running statistics.
        ln: Statistics of LayerNorm. ``'token'`` uses those of each token, as in the DTN paper. ``'image'`` uses those
            of the image, as in SN's own code.
        batch: Whether to include the statistics of BatchNorm.
        unbiased: Whether to divide the variance of InstanceNorm by T - 1. The variances of the image and of the batch
            are derived from it, as in SN's own code.
        sync: Whether to compute statistics over the batches of all processes in distributed training.

    Example:
        >>> SN(64)(torch.randn(2, 25, 42, 64)).shape
        torch.Size([2, 25, 42, 64])
    """

    FEWEST_DIMENSIONS = 3
    running_mean: Tensor
    running_var: Tensor

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float = 0.1,
        ln: str = 'token',
        batch: bool = True,
        unbiased: bool = False,
        sync: bool = True,
    ) -> None:
        super().__init__(num_features, eps)
        if ln not in ('token', 'image'):
            raise ValueError(f"ln={ln!r}: choose 'token', as in the DTN paper, or 'image', as in SN's own code.")
        self.momentum, self.ln, self.batch, self.unbiased, self.sync = momentum, ln, batch, unbiased, sync
        self.weight = nn.Parameter(torch.ones(num_features))
        self.bias = nn.Parameter(torch.zeros(num_features))
        self.mean_weight = nn.Parameter(torch.ones(2 + batch))
        self.var_weight = nn.Parameter(torch.ones(2 + batch))
        if batch:
            self.register_buffer('running_mean', torch.zeros(num_features))
            self.register_buffer('running_var', torch.ones(num_features))

    def normalise(self, x: Tensor) -> Tensor:
        (y,) = self._normalise_parts([in_full_precision(x).flatten(1, -2)])
        return y.view(x.shape)

    def normalise_real(self, tokens: Tensor, groups: Groups) -> Tensor:
        parts = self._normalise_parts(by_length(in_full_precision(tokens), groups))
        return torch.cat([part.flatten(0, 1) for part in parts])

    def _normalise_parts(self, parts: list[Tensor]) -> list[Tensor]:
        """Normalises a batch that is split into parts ``B x T x C``. T may differ between parts."""
        moments = [_moments(tokens, 1) for tokens in parts]
        if self.unbiased:
            for tokens in parts:
                check_more_than_one(tokens.shape[1])
            moments = [(m, v * (t.shape[1] / (t.shape[1] - 1))) for (m, v), t in zip(moments, parts, strict=True)]
        of_batch = self._of_batch(moments, [tokens.shape[1] for tokens in parts]) if self.batch else None
        return [self._mix(*part, of_batch) for part in zip(parts, moments, strict=True)]

    def _mix(self, tokens: Tensor, moments: tuple[Tensor, Tensor], of_batch: tuple[Tensor, Tensor] | None) -> Tensor:
        w, v = self.mean_weight.to(tokens).softmax(0), self.var_weight.to(tokens).softmax(0)
        mean, var = moments
        ln_mean, ln_var = _moments(tokens, -1) if self.ln == 'token' else _pooled(mean, var, -1)
        of_channels_mean, of_channels_var = w[0] * mean, v[0] * var
        if of_batch is not None:
            of_channels_mean = of_channels_mean + w[2] * of_batch[0]
            of_channels_var = of_channels_var + v[2] * of_batch[1]
        mu = of_channels_mean + w[1] * ln_mean
        scale = (of_channels_var + self.eps + v[1] * ln_var).rsqrt()
        return torch.addcmul(self.bias.to(tokens), (tokens - mu) * scale, self.weight.to(tokens))

    def _of_batch(self, moments: list[tuple[Tensor, Tensor]], lengths: list[int]) -> tuple[Tensor, Tensor]:
        """Computes the statistics of the batch from its images' moments and numbers of tokens."""
        if not self.training:
            like = moments[0][0]
            return self.running_mean.to(like), self.running_var.to(like)
        parts = [(mean, var, T) for (mean, var), T in zip(moments, lengths, strict=True)]
        count = sum(T * len(mean) for mean, _, T in parts)
        mu = batch_mean(torch.stack([T * mean.sum((0, 1)) for mean, _, T in parts]).sum(0), count, self.sync)
        squares = [T * (var + (mean - mu).square()).sum((0, 1)) for mean, var, T in parts]
        of_batch = mu, batch_mean(torch.stack(squares).sum(0), count, self.sync)
        with torch.no_grad():
            for running, new in zip((self.running_mean, self.running_var), of_batch, strict=True):
                running.lerp_(new.to(running), self.momentum)
        return of_batch


def _moments(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    # torch.var_mean takes six times as long on CPUs. The gradient through the mean is zero, so the mean is detached.
    mean = x.mean(dim, keepdim=True)
    return mean, (x - mean.detach()).square().mean(dim, keepdim=True)


def _pooled(mean: Tensor, var: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Returns the mean and variance of the union of equally large sets, given each set's mean and variance."""
    pooled = mean.mean(dim, keepdim=True)
    return pooled, (var + (mean - pooled).square()).mean(dim, keepdim=True)
