"""Exports a checkpoint to a file. The file is written only if its outputs agree with those of the model."""

import hashlib
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import mmengine.fileio
import torch
from torch import Tensor
from torch.export import Dim, ExportedProgram

from mmdtn.errors import UserError
from mmdtn.models import TrainedModel, load

from . import predict
from .files import FILE_KINDS, need_onnx
from .graphs import Graph, graph_of
from .inputs import classes_of, reads_bgr, steps_of
from .verify import Agreement, compare, finding_boxes

Size = tuple[int, int]  # height, width
MULTIPLE = 32  # dynamic heights and widths are multiples of this number, so that the maps of a pyramid fit
MOST = 128  # largest dynamic height and width, in multiples; this equals 4096 pixels
COLOURS = 3
# Image sizes for models with dynamic sizes. The first size is for tracing, and both sizes are for verification. If the
# last map of a pyramid were only one cell high or wide, the exporter would fix its size.
SIZES = {
    'classification': ((128, 160), (224, 192)),
    'detection': ((256, 320), (416, 288)),
    'raw': ((256, 320), (416, 288)),
}
PACKAGES = ('mmdtn', 'torch', 'onnx', 'mmengine', 'mmcv', 'mmdet', 'mmpretrain')


def export(
    config: str, checkpoint: str, out: Path, raw: bool = False, size: Size | None = None, form: str = 'onnx'
) -> list[Agreement]:
    """Exports a model to ``out`` and copies predict.py into the same folder.

    Returns comparisons of the exported model with the original: for ``size`` if it is given, and for two sizes
    otherwise.

    Args:
        config: Config of an MMPretrain classifier, or of a single-stage detector, Faster R-CNN or Mask R-CNN of
            MMDetection.
        checkpoint: Checkpoint of the model.
        out: Path of the file to write.
        raw: Export the outputs of the network instead of boxes or class scores.
        size: Height and width of the images. By default they are dynamic, in multiples of 32.
        form: ``'onnx'``, or ``'pt2'`` for an exported program of torch.
    """
    if form == 'onnx':
        need_onnx()
    ours = Path(predict.__file__)
    beside = out.parent / ours.name
    if beside.exists() and first_line(beside) != first_line(ours):  # the file of a different version is overwritten
        raise UserError(f'{beside} is another file and would be overwritten. Give another folder with --out.')
    out.parent.mkdir(parents=True, exist_ok=True)
    trained = load(config, checkpoint)
    channels = trained.cfg.model.get('backbone', {}).get('in_channels', COLOURS)
    if channels != COLOURS:
        raise UserError(
            f'{config}: the model takes images of {channels} channels, but only models for RGB images can be exported.'
        )
    graph = graph_of(trained.model, reads_bgr(trained.cfg), raw).eval().requires_grad_(False)
    sizes = chosen_sizes(graph, size)
    about = description(trained, graph, checkpoint, size)
    write, run = FILE_KINDS[form]
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f'.{out.name}-') as temporary:
        new = Path(temporary, out.name)
        names = graph.names(graph(*inputs(graph, *sizes[0])))
        write(program_of(graph, sizes[0], size is None), new, names, about)
        runner = run(new)
        batches = (1, 1) if graph.task == 'detection' else (2, 3)
        compared = [compare(graph, runner, batch, *sides) for batch, sides in zip(batches, sizes, strict=False)]
        if graph.task == 'detection' and not any(c.boxes for c in compared):
            # No box reached the score threshold, so compare the same model with a lower threshold.
            graph, lower = finding_boxes(graph, *sizes[0])
            other = Path(temporary, f'lower-{out.name}')
            write(program_of(graph, sizes[0], size is None), other, names, about)
            compared = [compare(graph, run(other), 1, *sides)._replace(score_thr=lower) for sides in sizes]
        new.rename(out)
    if form == 'onnx' and graph.task != 'raw':
        shutil.copy(ours, beside)
    return compared


def first_line(file: Path) -> str:
    return file.read_text().partition('\n')[0]


def chosen_sizes(graph: Graph, size: Size | None) -> list[Size]:
    if size is None:
        example, other = SIZES[graph.task]
        try:
            graph(*inputs(graph, *example)), graph(*inputs(graph, *other))
        except (ValueError, AssertionError, RuntimeError) as error:
            raise UserError(
                f'The model does not support dynamic image sizes. Give its size with --size H W. {error}'
            ) from error
        return [example, other]
    if graph.task != 'classification' and any(side % MULTIPLE for side in size):
        raise UserError(
            f'--size {size[0]} {size[1]}: detectors need a height and width that are multiples of {MULTIPLE}, such as '
            '800 1344.'
        )
    return [size]


def inputs(graph: Graph, height: int, width: int, batch: int = 1) -> tuple[Tensor, ...]:
    image = torch.rand(batch, COLOURS, height, width) * 255
    return (image, torch.tensor([height, width])) if graph.task == 'detection' else (image,)


def program_of(graph: Graph, example: Size, is_open: bool) -> ExportedProgram:
    batch = {} if graph.task == 'detection' else {0: Dim('batch', min=1, max=1024)}
    sides = {i: MULTIPLE * Dim(name, min=1, max=MOST) for i, name in ((2, 'height'), (3, 'width'))} if is_open else {}
    given = inputs(graph, *example, batch=2 if batch else 1)
    shapes = (batch | sides, None)[: len(given)]
    with torch.no_grad():
        return torch.export.export(graph, given, dynamic_shapes=shapes, strict=False)


def description(trained: TrainedModel, graph: Graph, checkpoint: str, size: Size | None) -> dict[str, Any]:
    """Returns the metadata of the exported file."""
    return dict(
        task=graph.task,
        classes=trained.classes or classes_of(trained.cfg),
        prepare=[] if graph.task == 'raw' else steps_of(trained.cfg),
        size=size,
        multiple=MULTIPLE,
        pad=graph.padding(),
        config=Path(trained.config).name,
        checkpoint=hashlib.sha256(mmengine.fileio.get(checkpoint)).hexdigest(),
        versions={name: sys.modules[name].__version__ for name in PACKAGES if name in sys.modules},
    )
