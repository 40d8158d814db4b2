"""An exported file beside the model that it came of, on pictures of two sizes."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mmdtn.datasets import CLASSES, draw_scene
from mmdtn.errors import UserError

from .files import TensorFunction
from .graphs import Graph, flattened
from .predict import pasted

TOLERANCE = 1e-3  # in scores and logits, and in the share of a picture in which a mask differs
PIXELS = 1e-2  # of a box: float32 keeps 1e-4 of coordinates over 1000, and a box is an exponential of what it comes of
OBJECTS = 8
REPEATS = 3


class Agreement(NamedTuple):
    shape: tuple[int, ...]
    difference: float
    boxes: int | None
    pixels: float | None  # between boxes
    original: float  # seconds
    exported: float
    score_thr: float | None = None  # where no box was over the model's own


@torch.no_grad()
def compare(graph: Graph, run: TensorFunction, batch: int, height: int, width: int) -> Agreement:
    inputs, as_read = pictures(graph, batch, height, width)
    want, got = original(graph, as_read), [tensor for _, tensor in flattened(run(*inputs), '')]
    of = len if graph.task == 'detection' else Tensor.size  # masks come as grids of their boxes
    shapes = [', '.join(str(of(tensor)) for tensor in found) for found in (got, want)]
    if shapes[0] != shapes[1]:
        raise UserError(
            f'At {height} x {width} pixels the exported model gives outputs of {shapes[0]}, but the original of '
            f'{shapes[1]}: no file was written.'
        )
    pixels = None
    if graph.task == 'detection':
        pixels, difference = boxes_apart(want, got)
        if not pixels <= PIXELS:
            raise UserError(
                f'Boxes of the exported model and of the original are {pixels:.2g} pixels apart at {height} x {width} '
                f'pixels, more than {PIXELS:g}: no file was written.'
            )
    else:
        difference = max(float((a - b).abs().max()) for a, b in zip(want, got, strict=True))
    if not difference <= TOLERANCE:
        raise UserError(
            f'The exported model and the original differ by {difference:.2g} at {height} x {width} pixels, more than '
            f'{TOLERANCE:g}: no file was written.'
        )
    seconds = shortest(lambda: original(graph, as_read)), shortest(lambda: run(*inputs))
    return Agreement(
        (batch, 3, height, width), difference, len(want[0]) if graph.task == 'detection' else None, pixels, *seconds
    )


def pictures(graph: Graph, batch: int, height: int, width: int) -> tuple[list[Tensor], Tensor]:
    """What a file of this size is given, and the same images as the model reads them.

    Those for detectors have an edge that is padded, where the model pads.
    """
    down, right = (min(edge, graph.model.data_preprocessor.pad_size_divisor - 1) for edge in (5, 3))
    size = (height - down, width - right) if graph.task == 'detection' else (height, width)
    images = np.stack([picture(seed, *size) for seed in range(batch)])
    padded = torch.tensor(graph.padding()).expand(batch, height, width, 3).contiguous()
    padded[:, : size[0], : size[1]] = torch.from_numpy(images)
    inputs = [padded.permute(0, 3, 1, 2).contiguous()] + [torch.tensor(size)] * (graph.task == 'detection')
    return inputs, torch.from_numpy(images[..., ::-1].copy() if graph.reads_bgr else images).permute(0, 3, 1, 2)


@torch.no_grad()
def finding_boxes(graph: Graph, height: int, width: int) -> tuple[Graph, float]:
    """The detector with a score threshold that some boxes exceed, and this threshold."""
    settings = getattr(graph.model, 'roi_head', graph.model.bbox_head).test_cfg
    settings.score_thr = 0.0
    scores = original(graph, pictures(graph, 1, height, width)[1])[1].sort(descending=True).values
    if len(scores) < 2:
        raise UserError('The model finds no boxes at all, so there is nothing to compare: no file was written.')
    # In the widest gap of the first scores: rounding may not move one across.
    first = scores[: 2 * OBJECTS]
    last = int((first[:-1] - first[1:]).argmax())
    settings.score_thr = float(first[last : last + 2].mean())
    return type(graph)(graph.model, graph.reads_bgr).eval().requires_grad_(False), settings.score_thr


def boxes_apart(want: list[Tensor], got: list[Tensor]) -> tuple[float, float]:
    """Of each box to the nearest of its class, the largest distance in pixels, and in scores and masks.

    Equal scores leave the order open.
    """
    (boxes, scores, labels), (other_boxes, other_scores, other_labels) = want[:3], got[:3]
    if len(labels) == 0:
        return 0.0, 0.0
    pixels = (boxes[:, None] - other_boxes).abs().amax(-1)
    points = (scores[:, None] - other_scores).abs()
    apart = pixels.maximum(points).masked_fill(labels[:, None] != other_labels, float('inf'))
    places, back = apart.argmin(1), apart.argmin(0)
    each, other = torch.arange(len(labels)), torch.arange(len(other_labels))
    found = float(apart[each, places].max()), float(apart[back, other].max())
    if max(found) == float('inf'):
        return float('inf'), float('inf')
    difference = float(max(points[each, places].max(), points[back, other].max()))
    if len(want) == 4:
        difference = max(difference, masks_apart(want[3], got[3][places], boxes))
    return float(max(pixels[each, places].max(), pixels[back, other].max())), difference


def masks_apart(masks: Tensor, grids: Tensor, boxes: Tensor) -> float:
    """The largest share of a picture's pixels in which a mask differs."""
    shown = (pasted(*one, *masks.shape[1:]) for one in zip(grids.numpy(), boxes.tolist(), strict=True))
    return max(float((a != b.numpy()).mean()) for a, b in zip(shown, masks, strict=True))


def original(graph: Graph, images: Tensor) -> list[Tensor]:
    """What MM's own code makes of images as they are read, as its test loop calls it."""
    model: Any = graph.model
    if graph.task == 'raw':
        normalised = model.data_preprocessor(dict(inputs=list(images), data_samples=None))['inputs']
        return [tensor for _, tensor in flattened(model(normalised, mode='tensor'), 'output')]
    if graph.task == 'classification':
        from mmpretrain.structures import DataSample

        samples = model.test_step(dict(inputs=list(images), data_samples=[DataSample() for _ in images]))
        return [torch.stack([sample.pred_score for sample in samples])]
    from mmdet.structures import DetDataSample

    size = tuple(images.shape[2:])
    sample = DetDataSample(metainfo=dict(img_shape=size, ori_shape=size, scale_factor=(1.0, 1.0)))
    (sample,) = model.test_step(dict(inputs=list(images), data_samples=[sample]))
    found = sample.pred_instances
    return [found[name] for name in ('bboxes', 'scores', 'labels', 'masks') if name in found]


def picture(seed: int, height: int, width: int) -> np.ndarray:
    """Objects, so that a detector has something to find: height x width x RGB."""
    rng = np.random.default_rng(seed)
    sizes = rng.uniform(0.1, 0.5, OBJECTS) * min(height, width)
    return draw_scene(rng, height, width, rng.integers(len(CLASSES), size=OBJECTS), sizes)[0]


def shortest(run: Callable[[], object]) -> float:
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return min(seconds)
