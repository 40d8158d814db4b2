"""What the definition, the operator and its back ends hand each other."""

from typing import NamedTuple

from torch import Tensor


class Tensors(NamedTuple):
    """What a layer computes from. A set of gradients is one of these, too."""

    x: Tensor  # B x H x W x C
    weight: Tensor  # C; this and all below in the dtype to compute in, float32 or float64
    bias: Tensor  # C
    mean_lambda: Tensor  # K
    var_lambda: Tensor  # K
    position: Tensor  # K x 3


class Settings(NamedTuple):
    """What a layer computes, beside its tensors."""

    pool_size: int = 1
    eps: float = 1e-5
    prenorm: bool = True
    unbiased: bool = False
    pool_second_moment: bool = True
    identity: bool = False


class Kept(NamedTuple):
    """What a back end keeps for its backward pass, beside the tensors."""

    of_tokens: Tensor  # K + 2 numbers of each token, in the back end's own order: 1 / RMS of each head, mean, variance
    of_channels: Tensor  # B x C: what is taken off each channel before variances are
