"""FeatureNorm, a learned mixture of several normalisations that becomes a single affine map at inference."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from mmengine.dist import all_reduce, get_world_size
from mmengine.registry import MODELS
from torch import Tensor, nn

from .base import check_groups, in_full_precision
from .batch_statistics import TaperingNorm, batch_mean

BRANCHES = ('zscore', 'minmax', 'identity')
FIRST_LEAD = 2.0  # initial logit of the first branch, whose share among three branches is then 79 percent


@MODELS.register_module()
class FeatureNorm(TaperingNorm):
    r"""Mixes the z-score, the min-max scaling and the input of each channel over all tokens of the batch::

        y = weight * (w1 z + w2 f + w3 x) + bias      w = softmax(mix), one row for each head's channels
        z = (x - mean) / sqrt(var + eps)              f = 2 (x - min) / (max - min + eps) - 1

    Evaluation uses running statistics, so all branches together are an affine map, which :meth:`as_affine` returns.

    The formulas are this project's interpretation of a dynamic learnable feature normalization with
    re-parameterisation, which was published without formulas. As in BatchNorm, gradients flow through the mean and the
    variance. No gradients flow through the minimum and maximum, where one token would receive all of them.

    Args:
        num_features: Channels, C.
        num_heads: Number of channel groups, each with its own mixture. Backbones pass their number of heads.
        branches: Branches to mix, from ``'zscore'``, ``'minmax'`` and ``'identity'``. The first starts with the largest
            share.
        eps: Added to the variance and to the range.
        momentum: Weight of the new batch in the running statistics.
        taper_iters: Number of training steps over which this norm replaces a LayerNorm, as in PRepBN. 0 uses none.
        sync: Whether to compute statistics over the batches of all processes in distributed training.

    Example:
        >>> FeatureNorm(64, num_heads=4)(torch.randn(2, 25, 42, 64)).shape
        torch.Size([2, 25, 42, 64])
    """

    FROM_PLACE = ('num_heads',)
    running_mean: Tensor
    running_var: Tensor
    running_min: Tensor
    running_max: Tensor

    def __init__(
        self,
        num_features: int,
        num_heads: int = 1,
        branches: Sequence[str] = BRANCHES,
        eps: float = 1e-5,
        momentum: float = 0.1,
        taper_iters: int = 0,
        sync: bool = True,
    ) -> None:
        super().__init__(num_features, eps)
        check_groups(self, num_heads, 'num_heads')
        if not branches or len({*branches}) < len(branches) or not {*branches} <= {*BRANCHES}:
            raise ValueError(f'branches={branches!r} should contain some of {BRANCHES}, each at most once.')
        if not isinstance(taper_iters, int) or taper_iters < 0:
            raise ValueError(
                f'taper_iters={taper_iters!r} should be a number of steps, or 0 to start without LayerNorm.'
            )
        self.num_heads, self.branches, self.momentum, self.sync = num_heads, tuple(branches), momentum, sync
        self.weight = nn.Parameter(torch.ones(num_features))
        self.bias = nn.Parameter(torch.zeros(num_features))
        self.mix = nn.Parameter(torch.tensor([FIRST_LEAD] + [0.0] * (len(branches) - 1)).repeat(num_heads, 1))
        self.register_buffer('running_mean', torch.zeros(num_features))
        self.register_buffer('running_var', torch.ones(num_features))
        self.register_buffer('running_min', -torch.ones(num_features))
        self.register_buffer('running_max', torch.ones(num_features))
        self.prepare_taper(taper_iters)

    def normalise(self, x: Tensor) -> Tensor:
        x = in_full_precision(x)
        rho = self.rho()
        if self.training:
            y = self._of_batch(x)
        else:
            a, b = self._affine(*(running.to(x) for running in self._running()))
            y = torch.addcmul(b, x, a)
        return self.taper(x, y, rho)

    def as_affine(self) -> tuple[Tensor, Tensor]:
        """Returns ``(a, b)`` such that ``y = a x + b`` in evaluation mode."""
        self.check_tapered()
        return self._affine(*self._running())

    def _running(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.running_mean, self.running_var, self.running_min, self.running_max

    def _affine(self, mean: Tensor, var: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        slope, level = self._from_low(mean - low, var, low, high)
        return slope, level - slope * low

    def _from_low(self, mean: Tensor, var: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """Returns ``(slope, level)`` such that ``y = slope (x - low) + level``. ``mean`` is the mean of ``x - low``.

        This form stays precise in channels with a small range far from zero.
        """
        of_std, of_range = (var + self.eps).rsqrt(), 2 / (high - low + self.eps)
        branches = dict(
            zscore=(of_std, -mean * of_std),
            minmax=(of_range, -torch.ones_like(low)),
            identity=(torch.ones_like(low), low),
        )
        slopes, levels = (torch.stack(t, -1) for t in zip(*(branches[name] for name in self.branches), strict=True))
        shares = self.mix.to(mean).softmax(-1).repeat_interleave(self.num_features // self.num_heads, 0)
        weight = self.weight.to(mean)
        return weight * (shares * slopes).sum(-1), self.bias.to(mean) + weight * (shares * levels).sum(-1)

    def _of_batch(self, x: Tensor) -> Tensor:
        tokens = x[..., 0].numel()
        processes = get_world_size() if self.sync else 1
        if tokens * processes == 1:
            raise ValueError(
                f'A batch of one token has no variance, but FeatureNorm got {" x ".join(map(str, x.shape))} in '
                'training. Use larger images or batches.'
            )
        low, high = x.detach().flatten(0, -2).aminmax(dim=0)
        if processes > 1:
            low, high = _of_all_processes(low, high)
        above = x - low
        mean = batch_mean(above.flatten(0, -2).sum(0), tokens, self.sync)
        # For the backward pass, the loss function saves its inputs but not their difference.
        squares = F.mse_loss(above, mean.detach().expand_as(above), reduction='none').flatten(0, -2).sum(0)
        # Each process adds a 1. The mean of the ones over all tokens yields the number of tokens.
        var, inverse = batch_mean(torch.cat((squares, x.new_ones(1))), tokens, self.sync).split((self.num_features, 1))
        self._remember(mean + low, var, low, high, processes / inverse)
        slope, level = self._from_low(mean, var, low, high)
        return torch.addcmul(level, above, slope)

    @torch.no_grad()
    def _remember(self, mean: Tensor, var: Tensor, low: Tensor, high: Tensor, tokens: Tensor) -> None:
        finite = (mean + var).isfinite().all()  # an overflow would stay in the averages forever
        usual = mean.new_tensor(self.momentum)
        of_range = torch.where(self.count == 0, torch.ones_like(usual), usual)
        new = mean, var * (tokens / (tokens - 1)), low, high
        for running, value, share in zip(self._running(), new, (usual, usual, of_range, of_range), strict=True):
            running.copy_(torch.where(finite, running.to(value).lerp(value, share), running.to(value)))
        self.count = self.count + finite  # not in place: compiled code recomputes rho in the backward pass


@torch.compiler.disable
def _of_all_processes(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    ends = torch.cat((-low, high))
    all_reduce(ends, 'max')
    low, high = ends.chunk(2)
    return -low, high
