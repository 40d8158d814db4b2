"""Counts the FLOPs of a model and the bytes that autograd saves for the backward pass."""

import itertools
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.ops import aten
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from mmdtn.norms import DTN
from mmdtn.ops import Settings


class SavedBytes:
    """Counts the bytes of the tensors that autograd saves for the backward pass.

    Each storage counts once. Parameters do not count.

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
    """Counts the FLOPs of a norm on one image of ``height x width`` tokens. One FLOP is one multiply-add.

    Every norm takes 5 FLOPs per element, which is mmengine's count for LayerNorm. DTN also multiplies the tokens and
    their squares by P, along rows and along columns.
    """
    return _norm_flops(height, width, channels, norm.pool_size if isinstance(norm, DTN) else None)


def _norm_flops(height: int, width: int, channels: int, pool_size: int | None) -> int:
    flops = 5 * height * width * channels
    if pool_size is not None:
        h, w = -(-height // pool_size), -(-width // pool_size)
        flops += 2 * channels * h * w * (h + w)
    return flops


def _per_element(number: int) -> Callable[..., int]:
    """Returns the FLOP formula of an operator that spends ``number`` multiply-adds on each element of its output."""
    return lambda *_, out_shape, **__: 2 * number * prod(out_shape if isinstance(out_shape[0], int) else out_shape[0])


def _dtn_flops(x: Sequence[int], *arguments: Any, **others: Any) -> int:
    images, height, width, channels = x
    settings = Settings(*arguments[-len(Settings._fields) :])
    pool_size = None if settings.identity else settings.pool_size
    return 2 * images * _norm_flops(height, width, channels, pool_size)


# FLOP formulas for operators that torch's counter does not support. Like torch's own formulas, they count a
# multiply-add as two FLOPs.
FORMULAS: dict[Any, Callable[..., int]] = {
    torch.ops.mmdtn.dtn: _dtn_flops,
    aten.native_layer_norm: _per_element(5),
    aten.native_group_norm: _per_element(5),
    aten.addcmul: _per_element(1),  # UN and FeatureNorm are affine maps in evaluation mode
    aten._adaptive_avg_pool2d: lambda shape, *_, **__: 2 * prod(shape),
    # torch's counter decomposes batch norms and F.interpolate into the following two operators and cheaper ones.
    aten._native_batch_norm_legit_no_training: _per_element(2),
    aten._unsafe_index: _per_element(1),
    aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v),
}


@torch.no_grad()
def flops_by_module(model: nn.Module, image: Tensor, *more: Any) -> dict[str, int]:
    """Counts the FLOPs of ``model(image, *more)`` for each module, by name. The key of the whole model is ``''``.

    One FLOP is one multiply-add.
    """
    with FlopCounterMode(display=False, custom_mapping=FORMULAS) as counter:
        model(image, *more)
    total = {name.partition('.')[2]: sum(by_op.values()) // 2 for name, by_op in counter.get_flop_counts().items()}
    return total | {'': counter.get_total_flops() // 2}


def exit_flops(model: nn.Module, image: Tensor) -> list[int]:
    """Returns the FLOPs that an image needs up to each exit of a :class:`mmdtn.dvt.DVT`.

    The FLOPs of an exit include those of all earlier exits.
    """
    flops = flops_by_module(model, image)
    exits = len(list(model.get_submodule('exits').children()))
    return list(itertools.accumulate(flops[f'exits.{i}'] for i in range(exits)))
