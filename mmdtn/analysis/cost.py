"""What a model costs."""

import itertools
from math import prod
from typing import Any

import torch
from mmengine.analysis import FlopAnalyzer
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


@torch.no_grad()
def flops_by_module(model: nn.Module, image: Tensor) -> dict[str, int]:
    """FLOPs of ``model(image)``, the whole under ``''`` and each part under its name; a FLOP is a multiply-add."""
    elements: dict[str, int] = {}
    hooks = []
    for name, module in model.named_modules():
        if isinstance(module, DTN):
            elements[name] = 0

            def note(module: nn.Module, inputs: tuple[Tensor, ...], name: str = name) -> None:
                elements[name] += inputs[0].numel()

            hooks.append(module.register_forward_pre_hook(note))
    model(image)
    for hook in hooks:
        hook.remove()
    analyzer = FlopAnalyzer(model, (image,)).unsupported_ops_warnings(False).tracer_warnings('none')
    analyzer.uncalled_modules_warnings(False).set_op_handle('aten::scaled_dot_product_attention', _attention_flops)
    analyzer.set_op_handle('aten::matmul', _product_flops)
    analyzer.set_op_handle('aten::addcmul', _elements)  # an affine map, as UN and FeatureNorm are in evaluation
    flops = {name: int(n) for name, n in analyzer.by_module().items()}
    # mmengine counts the products of P, but not the elementwise part: 5 for each element, as it says of LayerNorm.
    for name, number in elements.items():
        parts = name.split('.')
        for whole in {'.'.join(parts[:i]) for i in range(len(parts) + 1)}:
            flops[whole] = flops.get(whole, 0) + 5 * number
    return flops


def exit_flops(model: nn.Module, image: Tensor) -> list[int]:
    """For each exit of a :class:`mmdtn.dvt.DVT`, what an image costs that leaves there: it and all exits before."""
    flops = flops_by_module(model, image)
    exits = len(list(model.get_submodule('exits').children()))
    return list(itertools.accumulate(flops[f'exits.{i}'] for i in range(exits)))


def _product_flops(inputs: list[Any], outputs: list[Any]) -> int:
    """Of ``aten::matmul``, whose factors mmengine takes to have the same dimensions in front; P is broadcast."""
    return prod(outputs[0].type().sizes()) * inputs[0].type().sizes()[-1]


def _elements(inputs: list[Any], outputs: list[Any]) -> int:
    return prod(outputs[0].type().sizes())


def _attention_flops(inputs: list[Any], outputs: list[Any]) -> int:
    """Scores and weighted sum of ``aten::scaled_dot_product_attention``, which mmengine does not count."""
    query, key, value = (tensor.type().sizes() for tensor in inputs[:3])
    return prod(query[:-1]) * key[-2] * (query[-1] + value[-1])
