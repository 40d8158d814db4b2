"""Types shared by the reference, the operator and the back ends."""

from typing import NamedTuple

from torch import Tensor


class Tensors(NamedTuple):
    """Input and parameters of a layer, or the gradients of these."""

    x: Tensor  # B x H x W x C
    weight: Tensor  # C; all parameters have the dtype of the computation, float32 or float64
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
