"""Dynamic Token Normalization (Shao et al., ICLR 2022) as a layer."""

import inspect
import itertools
import math
from typing import Any

import torch
from mmengine.registry import MODELS
from timm.layers import trunc_normal_
from torch import Tensor, nn

from mmdtn.ops import Settings, Tensors, dtn, prepare

from .base import check_values
from .lengths import Lengths, RealTokens, for_each_length

POSITIONS = ('learned', 'uniform', 'identity')
POSITION_INITS = ('local', 'line', 'trunc_normal')
MANY_PREFIX_TOKENS = 16  # no published model has more, so a larger number means a wrong grid


@MODELS.register_module()
class DTN(nn.Module):
    r"""Normalises each token with a mixture of its own statistics and its neighbourhood's statistics.

    ``x^k`` denotes the channels of head k. The layer computes (Section 3 of the paper)::

        y     = weight * (x^k - mu^k) / sqrt(var^k + eps) + bias
        mu^k  = lambda_mean^k * mean(x) + (1 - lambda_mean^k) * P^k x^k
        var^k = lambda_var^k * var(x) + (1 - lambda_var^k) * (P^k (x^k)^2 - (P^k x^k)^2)
        P^k   = softmax_j(a_1 (dx^2 + dy^2) + a_2 dx + a_3 dy)

    ``mean(x)`` and ``var(x)`` are the statistics of LayerNorm. ``(dx, dy)`` is the offset from a token to its
    neighbour, measured in tokens or, with pooling, in cells. The grid may have any size, even a new one in each call.

    Args:
        num_features: Channels, C.
        num_heads: Number of heads, K. Each head has its own lambdas and its own neighbourhood.
        pool_size: Side length of the cells. All tokens of a cell share the same neighbourhood statistics. eps: Added to
        the variance and to the mean square of ``prenorm``. affine: Whether to learn ``weight`` and ``bias``. prenorm:
        Whether to first divide each head of each token by its root mean square, as in the published models.
        mean_lambda: Fixed value of lambda_mean. 1 uses LayerNorm's mean. None learns lambda_mean, starting from 1/2.
        var_lambda: Fixed value of lambda_var, or None to learn it. position: ``'learned'`` learns the coefficients of
        P. ``'uniform'`` and ``'identity'`` fix P. position_init: Initial coefficients of P. ``'local'`` follows Eq. 7.
        ``'line'`` puts the heads of Eq. 7 side by
            side on a line, for sequences. ``'trunc_normal'`` is random.
        unbiased: Whether to divide LayerNorm's variance by C - 1, as in the published code. pool_second_moment: Whether
        to include the variance within a cell, which the published code omits.

    Shapes:
        The input is ``B x H x W x C``, or ``B x (p + H W) x C`` with ``hw_shape=(H, W)`` and ``num_prefix_tokens=p``.
        The output has the same shape. The first p tokens, such as a class token, have no position on the grid. P
        ignores these tokens, and their lambdas are 1, which means LayerNorm if ``prenorm=False``.

        With ``lengths``, the input is a padded batch of sequences ``B x T x C``, whose tokens lie on a line. A length
        is a sequence's number of real tokens, which come before its padding. Padding does not affect real tokens and
        their gradients, and its output is 0.

    Example:
        >>> layer = DTN(64, num_heads=4, pool_size=2)
        >>> layer(torch.randn(2, 25, 42, 64)).shape
        torch.Size([2, 25, 42, 64])
        >>> layer(torch.randn(2, 1051, 64), hw_shape=(25, 42), num_prefix_tokens=1).shape
        torch.Size([2, 1051, 64])
        >>> layer(torch.randn(2, 1051, 64), lengths=[1051, 600]).shape
        torch.Size([2, 1051, 64])
    """

    FROM_PLACE = ('num_heads', 'pool_size', 'position_init')
    NEEDS_GRID = True

    def __init__(
        self,
        num_features: int,
        num_heads: int = 1,
        pool_size: int = 1,
        eps: float = 1e-5,
        affine: bool = True,
        prenorm: bool = True,
        mean_lambda: float | None = None,
        var_lambda: float | None = None,
        position: str = 'learned',
        position_init: str = 'local',
        unbiased: bool = False,
        pool_second_moment: bool = True,
    ) -> None:
        super().__init__()
        self.num_features = num_features
        self.num_heads = num_heads
        self.pool_size = pool_size
        self.position_init = position_init
        self.mean_lambda = mean_lambda
        self.var_lambda = var_lambda
        self.options: dict[str, Any] = dict(
            num_heads=num_heads,
            pool_size=pool_size,
            eps=eps,
            affine=affine,
            prenorm=prenorm,
            mean_lambda=mean_lambda,
            var_lambda=var_lambda,
            position=position,
            position_init=position_init,
            unbiased=unbiased,
            pool_second_moment=pool_second_moment,
        )
        _check_arguments(num_features, **self.options)
        check_values(DTN, self.options)
        self.eps = eps  # torch's transformer layers read this attribute of their norms
        self.settings = Settings(pool_size, eps, prenorm, unbiased, pool_second_moment, position == 'identity')
        self.prefix_settings = self.settings._replace(pool_size=1, identity=True)

        def parameter(wanted: bool, *shape: int) -> nn.Parameter | None:
            return nn.Parameter(torch.empty(shape)) if wanted else None

        self.weight = parameter(affine, num_features)
        self.bias = parameter(affine, num_features)
        self.mean_mix = parameter(self.mean_lambda is None, num_heads)
        self.var_mix = parameter(self.var_lambda is None, num_heads)
        self.position = parameter(position == 'learned', num_heads, 3)
        self.reset_parameters()
        self._check_kernels()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialises the affine part like LayerNorm, the lambdas to 1/2, and P according to ``position_init``."""
        if self.weight is not None and self.bias is not None:
            nn.init.ones_(self.weight)
            nn.init.zeros_(self.bias)
        for mix in (self.mean_mix, self.var_mix):
            if mix is not None:
                nn.init.zeros_(mix)
        if self.position is not None:
            start_position(self.position, self.position_init)

    def _apply(self, *args: Any, **kwargs: Any) -> 'DTN':
        # torch has no public hook for moves between devices, so torch.nn.RNNBase also overrides this method.
        super()._apply(*args, **kwargs)
        self._check_kernels()
        return self

    def _check_kernels(self) -> None:
        """Checks the GPU kernels now, so that the check does not run during a training step."""
        for parameter in self.parameters(recurse=False):
            if type(parameter) is nn.Parameter:  # but not a fake tensor
                prepare(parameter.device)

    def forward(
        self,
        x: Tensor,
        hw_shape: tuple[int, int] | None = None,
        num_prefix_tokens: int = 0,
        feeds_autocast: bool = False,
        lengths: Lengths | None = None,
    ) -> Tensor:
        """Normalises ``x``; see Shapes above.

        ``feeds_autocast`` tells the norm that autocast runs all layers after it in half precision, like ``nn.Linear``.
        The norm then returns half precision itself. Autocast would yield the same values, but with another pass over
        memory.
        """
        _check_input(x, hw_shape, num_prefix_tokens, self.num_features, lengths is not None)
        dtype = _autocast_dtype(x) if feeds_autocast else None
        # Statistics need at least float32, and have the dtype to which the parameters are converted here.
        like = x.new_empty(0, dtype=torch.promote_types(x.dtype, torch.float32))
        C, K = self.num_features, self.num_heads
        parameters = (
            like.new_ones(C) if self.weight is None else self.weight.to(like),
            like.new_zeros(C) if self.bias is None else self.bias.to(like),
            _lambda(self.mean_mix, self.mean_lambda, like, K),
            _lambda(self.var_mix, self.var_lambda, like, K),
            like.new_zeros(K, 3) if self.position is None else self.position.to(like),
        )
        if lengths is not None:
            real = RealTokens(x, lengths)

            def on_a_line(sequences: Tensor) -> Tensor:
                return dtn(Tensors(sequences[:, None], *parameters), self.settings, dtype)[:, 0]

            return real.put_back(for_each_length(on_a_line, real.tokens, real.groups))
        t = Tensors(x if x.dim() == 4 else x[:, num_prefix_tokens:].unflatten(1, hw_shape), *parameters)
        y = dtn(t, self.settings, dtype)
        if num_prefix_tokens == 0:
            return y.view(x.shape)
        one = like.new_ones(K)
        prefix = Tensors(x[:, None, :num_prefix_tokens], t.weight, t.bias, one, one, like.new_zeros(K, 3))
        return torch.cat((dtn(prefix, self.prefix_settings, dtype)[:, 0], y.flatten(1, 2)), 1)

    def extra_repr(self) -> str:
        default = {p.name: p.default for p in inspect.signature(DTN).parameters.values()}
        unusual = (f'{name}={value!r}' for name, value in self.options.items() if value != default[name])
        return ', '.join([str(self.num_features), *unusual])


@MODELS.register_module()
class DTN2d(DTN):
    """:class:`DTN` on maps ``B x C x H x W``.

    Example:
        >>> DTN2d(64, num_heads=4)(torch.randn(2, 64, 25, 42)).shape
        torch.Size([2, 64, 25, 42])
    """

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]  # a map has its grid in its shape
        if x.dim() != 4:
            raise ValueError(f'DTN2d takes B x C x H x W, but got {_shape(x)}. For tokens with channels last, use DTN.')
        if x.shape[1] != self.num_features:
            raise ValueError(f'DTN2d({self.num_features}) takes B x {self.num_features} x H x W, but got {_shape(x)}.')
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def _autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Returns the dtype to which autocast converts the input ``x`` of a linear layer, or None without autocast."""
    device = x.device.type
    if x.dtype == torch.float64 or not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


def _lambda(mix: Tensor | None, fixed: float | None, like: Tensor, num_heads: int) -> Tensor:
    if mix is not None:
        return mix.to(like).sigmoid()
    assert fixed is not None  # without a fixed value, there is a mix
    return like.new_full((num_heads,), fixed)


@torch.no_grad()
def start_position(position: Tensor, init: str) -> None:
    """Initialises the ``K x 3`` coefficients of ``dx^2 + dy^2``, ``dx`` and ``dy``."""
    trunc_normal_(position, std=0.02)
    if init == 'local':
        start = torch.tensor(local_start(len(position)))
        position[: len(start)] = start.to(position)
    elif init == 'line':
        position.copy_(torch.tensor(line_start(len(position))))


def mix_of(share: float) -> float:
    """Returns the logit of a lambda, for ``mean_mix`` or ``var_mix``. For 1 it is 20, whose sigmoid is 1 in float32."""
    if not isinstance(share, int | float) or isinstance(share, bool) or not 0 <= share <= 1:
        raise ValueError(
            f'warm_start={share!r}: the initial value of both lambdas should be a number from 0 to 1, such as 0.999.'
        )
    inside = min(max(share, 1e-9), 1 - 1e-9)
    return min(max(math.log(inside / (1 - inside)), -20.0), 20.0)


def local_start(num_heads: int) -> list[list[float]]:
    """Returns Eq. 7 of the paper. The largest possible square number of heads look at places around the token."""
    side = math.isqrt(num_heads)
    offsets = [i - (side - 1) / 2 for i in range(side)]
    return [[-1.0, 2 * dx, 2 * dy] for dx, dy in itertools.product(offsets, offsets)]


def line_start(num_heads: int) -> list[list[float]]:
    """Returns Eq. 7 of the paper for a line. The K heads look at adjacent places centred on the token."""
    return [[-1.0, 2 * (k - (num_heads - 1) / 2), 0.0] for k in range(num_heads)]


def _check_arguments(
    num_features: int,
    num_heads: int,
    pool_size: int,
    mean_lambda: float | None,
    var_lambda: float | None,
    position: str,
    position_init: str,
    unbiased: bool,
    **_: Any,
) -> None:
    for name, number in dict(num_features=num_features, num_heads=num_heads, pool_size=pool_size).items():
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise ValueError(f'{name}={number!r}: DTN needs a whole number of at least 1.')
    if num_features % num_heads:
        fitting = [n for n in range(1, min(num_features, 32) + 1) if num_features % n == 0]
        raise ValueError(
            f'num_heads={num_heads} does not divide num_features={num_features}. Its divisors up to 32 are {fitting}.'
        )
    if unbiased and num_features == 1:
        raise ValueError('unbiased=True divides by num_features - 1, which is 0 for num_features=1.')
    for name, fixed in dict(mean_lambda=mean_lambda, var_lambda=var_lambda).items():
        if fixed is not None and not (isinstance(fixed, int | float) and 0 <= fixed <= 1):
            raise ValueError(f'{name}={fixed!r}: a fixed lambda should be a number from 0 to 1. None learns it.')
    for name, value, choices in (('position', position, POSITIONS), ('position_init', position_init, POSITION_INITS)):
        if value not in choices:
            raise ValueError(f'{name}={value!r}: choose one of {choices}.')


def _check_input(
    x: Tensor, hw_shape: tuple[int, int] | None, num_prefix_tokens: int, channels: int, on_a_line: bool
) -> None:
    if not x.is_floating_point():
        raise ValueError(
            f'DTN normalises floating-point tokens, but got {x.dtype}. Convert them first, as in x.float().'
        )
    if x.dim() not in (3, 4):
        raise ValueError(f'DTN takes B x H x W x {channels}, or B x T x {channels} with hw_shape, but got {_shape(x)}.')
    if x.shape[-1] != channels:
        hint = f' For B x {channels} x H x W, use DTN2d.' if x.dim() == 4 and x.shape[1] == channels else ''
        raise ValueError(f'This DTN normalises {channels} channels in the last dimension, but got {_shape(x)}.{hint}')
    if 0 in x.shape[1:]:
        raise ValueError(f'DTN needs at least one token, but got {_shape(x)}.')
    if on_a_line:
        if hw_shape is not None or num_prefix_tokens:
            raise ValueError(
                f'With lengths, tokens lie on a line. Do not pass hw_shape={hw_shape} and num_prefix_tokens='
                f'{num_prefix_tokens} as well.'
            )
        return
    if x.dim() == 4:
        if hw_shape is not None and tuple(hw_shape) != tuple(x.shape[1:3]):
            raise ValueError(f'hw_shape={tuple(hw_shape)} differs from the grid of {_shape(x)}. Leave it out.')
        if num_prefix_tokens:
            raise ValueError(
                f'num_prefix_tokens={num_prefix_tokens} is only for flat tokens B x T x {channels} with hw_shape, but '
                f'got the map {_shape(x)}.'
            )
        return
    if hw_shape is None:
        raise ValueError(f'Flat tokens {_shape(x)} need their grid: layer(x, hw_shape=(height, width)).')
    if num_prefix_tokens < 0:
        raise ValueError(f'num_prefix_tokens={num_prefix_tokens!r} should be a whole number that is not negative.')
    height, width = hw_shape
    if num_prefix_tokens + height * width != x.shape[1]:
        hint, more = '', x.shape[1] - height * width
        if 0 < more <= MANY_PREFIX_TOKENS:
            hint = f' If a class token or similar comes before the grid, pass num_prefix_tokens={more}.'
        raise ValueError(
            f'hw_shape={tuple(hw_shape)} has {height * width} tokens'
            f'{f", and there are {num_prefix_tokens} in front of them" if num_prefix_tokens else ""}, but got '
            f'{x.shape[1]} in {_shape(x)}.{hint}'
        )


def _shape(x: Tensor) -> str:
    return ' x '.join(map(str, x.shape))
