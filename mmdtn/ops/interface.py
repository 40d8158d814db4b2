"""Types that the reference, the operator and the back ends share."""

from typing import NamedTuple

from torch import Tensor


class Tensors(NamedTuple):
    """The input and the parameters of a layer, or their gradients."""

    x: Tensor  # B x H x W x C
    weight: Tensor  # C; parameters have the dtype of the computation, float32 or float64
    bias: Tensor  # C
    mean_lambda: Tensor  # K
    var_lambda: Tensor  # K
    position: Tensor  # K x 3


class Settings(NamedTuple):
    """Options of a layer."""

    pool_size: int = 1
    eps: float = 1e-5
    prenorm: bool = True
    unbiased: bool = False
    pool_second_moment: bool = True
    identity: bool = False
