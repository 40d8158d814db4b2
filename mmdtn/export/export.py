"""A checkpoint to a file, which is written only if it computes what the model computes."""

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
MULTIPLE = 32  # of open sides: maps of a pyramid fit each other with no less
MOST = 128  # multiples, 4096 pixels
COLOURS = 3
# What an open size is exported at, and one that is tried as well. With fewer than two cells in the last map of a
# pyramid the exporter would take it for one cell in every image.
SIZES = {
    'classification': ((128, 160), (224, 192)),
    'detection': ((256, 320), (416, 288)),
    'raw': ((256, 320), (416, 288)),
}
PACKAGES = ('mmdtn', 'torch', 'onnx', 'mmengine', 'mmcv', 'mmdet', 'mmpretrain')


def export(
    config: str, checkpoint: str, out: Path, raw: bool = False, size: Size | None = None, form: str = 'onnx'
) -> list[Agreement]:
    """Writes ``out``, and predict.py beside it; returns how it compares with the model, at two sizes if it takes two.

    Args:
        config: Of a classifier of MMPretrain, or of MMDetection a single-stage detector, Faster or Mask R-CNN.
        checkpoint: Its weights.
        out: The file.
        raw: What the network computes, in place of boxes or of classes.
        size: Height and width that the file takes; any multiples of 32 if not said.
        form: ``'onnx'``, or ``'pt2'`` for torch's exported program.
    """
    if form == 'onnx':
        need_onnx()
    ours = Path(predict.__file__)
    beside = out.parent / ours.name
    if beside.exists() and first_line(beside) != first_line(ours):  # of another version it is replaced
        raise UserError(f'{beside} is not the file that would be put there: name another folder in --out.')
    out.parent.mkdir(parents=True, exist_ok=True)
    trained = load(config, checkpoint)
    channels = trained.cfg.model.get('backbone', {}).get('in_channels', COLOURS)
    if channels != COLOURS:
        raise UserError(f'{config}: the model takes images of {channels} channels; exported files take RGB images.')
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
            # Nothing was compared: what the same graph finds with a lower threshold is.
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
                f'The model does not take images of other sizes: say which with --size H W. {error}'
            ) from error
        return [example, other]
    if graph.task != 'classification' and any(side % MULTIPLE for side in size):
        raise UserError(f'--size {size[0]} {size[1]}: detectors take sides that {MULTIPLE} divides, as 800 1344.')
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
    """What the file says of itself."""
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
