"""Modules in ONNX Runtime, as the tests of exports run them."""

from collections.abc import Callable, Sequence

import onnxruntime
import torch
from torch import Tensor, nn


def in_onnx_runtime(program: torch.onnx.ONNXProgram) -> Callable[..., list[Tensor]]:
    """Tensors to tensors, as the program computes them there."""
    session = onnxruntime.InferenceSession(program.model_proto.SerializeToString())
    names = [i.name for i in session.get_inputs()]

    def run(*inputs: Tensor) -> list[Tensor]:
        fed = {name: x.numpy() for name, x in zip(names, inputs, strict=True)}
        return [torch.from_numpy(y) for y in session.run(None, fed)]

    return run


@torch.no_grad()
def largest_difference(run: Callable[..., Sequence[Tensor]], module: nn.Module, x: Tensor) -> float:
    return max(float((got - want).abs().max()) for got, want in zip(run(x), module(x), strict=True))
