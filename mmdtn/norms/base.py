"""The base class of all normalisers except DTN, and checks of their arguments."""

import inspect
import math
import types
from collections.abc import Mapping
from typing import Any, get_args

import torch
from torch import Tensor, nn

from .lengths import Groups, Lengths, RealTokens

TORCHS_BATCH_AND_INSTANCE_NORMS = nn.modules.batchnorm._NormBase  # torch has no public name for this base class


KINDS: dict[Any, str] = {
    bool: 'True or False',
    int: 'a whole number',
    float: 'a finite number',
    types.NoneType: 'None',
}


def check_values(norm: type[nn.Module], values: Mapping[str, Any]) -> None:
    """Raises an error if the type of a value differs from the one that the norm's constructor declares."""
    parameters = inspect.signature(norm).parameters
    for name, value in values.items():
        declared = parameters[name].annotation if name in parameters else None
        kinds = get_args(declared) or (declared,)
        if not all(kind in KINDS for kind in kinds):
            continue  # the norms themselves check names and sequences
        expected = ' or '.join(KINDS[kind] for kind in kinds)
        if not any(_is(value, kind) for kind in kinds):
            raise ValueError(f'{name}={value!r}: {norm.__name__} needs {expected}.')
        if name == 'eps' and value < 0:
            raise ValueError(f'eps={value!r}: {norm.__name__} needs a number that is not negative, such as 1e-5.')


def _is(value: Any, kind: Any) -> bool:
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, int | float) and math.isfinite(value) if kind is float else isinstance(value, kind)


class TokenNorm(nn.Module):
    """Base class of norms for tokens with channels last: ``B x H x W x C``, ``B x T x C`` or ``B x 1 x (T + 1) x C``.

    The output has the dtype of the input. A subclass implements :meth:`normalise` and stores every constructor argument
    in an attribute of the same name.

    ``norm(x, lengths=...)`` normalises a padded batch of sequences ``B x T x C`` as if there were no padding. A length
    is a sequence's number of real tokens, which come before its padding. Padding does not affect real tokens and their
    gradients, and its output is 0. The CPU reads the lengths, so pass a list or a CPU tensor.
    """

    FEWEST_DIMENSIONS = 2
    repeatable = True  # whether a second forward pass in the same step, as in checkpointing, gives the same result

    def __init__(self, num_features: int, eps: float) -> None:
        super().__init__()
        if not isinstance(num_features, int) or isinstance(num_features, bool) or num_features < 1:
            raise ValueError(
                f'num_features={num_features!r}: {type(self).__name__} needs the number of channels, at least 1.'
            )
        check_values(type(self), dict(eps=eps))
        self.num_features = num_features
        self.eps = eps

    def forward(self, x: Tensor, lengths: Lengths | None = None) -> Tensor:
        if not x.is_floating_point():
            raise ValueError(
                f'{type(self).__name__} normalises floating-point tokens, but got {x.dtype}. Convert them first, as in '
                'x.float().'
            )
        if x.dim() < self.FEWEST_DIMENSIONS or x.shape[-1] != self.num_features:
            raise ValueError(
                f'This {type(self).__name__} takes {self.num_features} channels in the last dimension of '
                f'{self.FEWEST_DIMENSIONS} or more, but got {" x ".join(map(str, x.shape))}. Permute B x C x H x W '
                'first: x.permute(0, 2, 3, 1).'
            )
        if lengths is None:
            return self.normalise(x).to(x.dtype)
        real = RealTokens(x, lengths)
        return real.put_back(self.normalise_real(real.tokens, real.groups).to(x.dtype))

    def normalise(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def normalise_real(self, tokens: Tensor, groups: Groups) -> Tensor:
        """Normalises the real tokens of a batch, ``N x C``.

        Norms of single tokens or of the whole batch do not need to know which sequence a token belongs to.
        """
        return self.normalise(tokens)

    def extra_repr(self) -> str:
        options = [p for p in inspect.signature(type(self)).parameters.values() if p.default is not p.empty]
        unusual = (f'{p.name}={getattr(self, p.name)!r}' for p in options if getattr(self, p.name) != p.default)
        return ', '.join([str(self.num_features), *unusual])


def in_full_precision(x: Tensor) -> Tensor:
    """Converts half precision to float32, because statistics would otherwise lose precision."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def check_groups(norm: TokenNorm, num_groups: int, name: str = 'num_groups') -> None:
    if not isinstance(num_groups, int) or num_groups < 1 or norm.num_features % num_groups:
        raise ValueError(
            f'{name}={num_groups!r} does not divide the num_features={norm.num_features} of '
            f'{type(norm).__name__}: choose one of their divisors.'
        )


def check_more_than_one(tokens: int) -> None:
    if tokens == 1:
        raise ValueError('unbiased=True divides by T - 1, which is 0 for an image of one token.')
