"""What a model costs."""

from typing import Any

import torch
from torch import Tensor, nn


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
