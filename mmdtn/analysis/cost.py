"""What a model costs."""

from typing import Any

import torch
from torch import Tensor, nn

from mmdtn.norms import DTN


class SavedBytes:
    """Counts what autograd keeps between forward and backward: each storage once, parameters left out.

    Example:
        >>> layer, x = nn.LayerNorm(8), torch.randn(4, 8, requires_grad=True)
        >>> with SavedBytes(layer) as saved:
        ...     y = layer(x)
        >>> saved.total >= x.nbytes
        True
    """

    def __init__(self, model: nn.Module) -> None:
        self._parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self._storages: dict[int, int] = {}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda t: t)

    def _pack(self, t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in self._parameters:
            self._storages[storage.data_ptr()] = storage.nbytes()
        return t

    def __enter__(self) -> 'SavedBytes':
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)

    @property
    def total(self) -> int:
        return sum(self._storages.values())


def norm_flops(norm: nn.Module, height: int, width: int, channels: int) -> int:
    """FLOPs of a norm on one image of ``height x width`` tokens; a FLOP is a multiply-add.

    5 for each element, as mmengine has it for LayerNorm, and for DTN the products of P along rows and columns, with
    the tokens and with their squares.
    """
    flops = 5 * height * width * channels
    if isinstance(norm, DTN):
        h, w = -(-height // norm.pool_size), -(-width // norm.pool_size)
        flops += 2 * channels * h * w * (h + w)
    return flops
