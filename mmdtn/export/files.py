"""Writes exported programs with their metadata to files and runs these files."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram

from mmdtn.errors import UserError

TensorFunction = Callable[..., Sequence[Tensor]]
ABOUT = 'mmdtn'  # key of the metadata in the file


def need_onnx() -> None:
    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    except ModuleNotFoundError as error:
        raise UserError(
            f'{error.name} is needed to write and verify an ONNX file. Install it with pip install mmdtn[export]'
        ) from None


def write_onnx(program: ExportedProgram, path: Path, outputs: Sequence[str], about: dict[str, Any]) -> None:
    written = torch.onnx.export(program, verbose=False, output_names=list(outputs))
    assert written is not None
    written.model.metadata_props[ABOUT] = json.dumps(about)
    written.save(path)


def run_onnx(path: Path) -> TensorFunction:
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path))
    names = [i.name for i in session.get_inputs()]

    def run(*inputs: Tensor) -> list[Tensor]:
        fed = {name: x.numpy() for name, x in zip(names, inputs, strict=True)}
        return [torch.from_numpy(y) for y in session.run(None, fed)]

    return run


def write_pt2(program: ExportedProgram, path: Path, outputs: Sequence[str], about: dict[str, Any]) -> None:
    extra = {f'{ABOUT}.json': json.dumps(about | dict(outputs=list(outputs)))}
    with path.open('wb') as file:  # if given a path, torch would check its suffix
        torch.export.save(program, file, extra_files=extra)


def run_pt2(path: Path) -> TensorFunction:
    with path.open('rb') as file:
        return torch.export.load(file).module()


FILE_KINDS: dict[str, tuple[Callable[..., None], Callable[[Path], TensorFunction]]] = dict(
    onnx=(write_onnx, run_onnx), pt2=(write_pt2, run_pt2)
)
