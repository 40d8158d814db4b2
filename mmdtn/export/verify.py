"""Compares an exported file with its original model on generated images."""

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

TOLERANCE = 1e-3  # largest allowed difference of scores and logits, and largest allowed share of differing mask pixels
# Largest allowed difference between two boxes, in pixels. float32 has a resolution of 1e-4 at coordinates over 1000,
# and boxes are exponentials of the network's outputs.
PIXELS = 1e-2
OBJECTS = 8
REPEATS = 3


class Agreement(NamedTuple):
    shape: tuple[int, ...]
    difference: float
    boxes: int | None
    pixels: float | None  # largest difference between boxes
    original: float  # seconds per forward pass of the original model
    exported: float  # seconds per forward pass of the exported model
    score_thr: float | None = None  # lowered score threshold if no box reached the config's threshold


@torch.no_grad()
def compare(graph: Graph, run: TensorFunction, batch: int, height: int, width: int) -> Agreement:
    inputs, as_read = pictures(graph, batch, height, width)
    want, got = original(graph, as_read), [tensor for _, tensor in flattened(run(*inputs), '')]
    of = len if graph.task == 'detection' else Tensor.size  # exported masks are grids, so only their number is compared
    shapes = [', '.join(str(of(tensor)) for tensor in found) for found in (got, want)]
    if shapes[0] != shapes[1]:
        raise UserError(
            f'No file was written: at {height} x {width} pixels the outputs of the exported model have shapes '
            f'{shapes[0]}, but those of the original model {shapes[1]}.'
        )
    pixels = None
    if graph.task == 'detection':
        pixels, difference = boxes_apart(want, got)
        if not pixels <= PIXELS:
            raise UserError(
                f'No file was written: boxes of the exported and the original model differ by {pixels:.2g} pixels for '
                f'images of {height} x {width}, but at most {PIXELS:g} pixels are allowed.'
            )
    else:
        difference = max(float((a - b).abs().max()) for a, b in zip(want, got, strict=True))
    if not difference <= TOLERANCE:
        raise UserError(
            f'No file was written: outputs of the exported and the original model differ by {difference:.2g} for '
            f'images of {height} x {width} pixels, but at most {TOLERANCE:g} is allowed.'
        )
    seconds = shortest(lambda: original(graph, as_read)), shortest(lambda: run(*inputs))
    return Agreement(
        (batch, 3, height, width), difference, len(want[0]) if graph.task == 'detection' else None, pixels, *seconds
    )


def pictures(graph: Graph, batch: int, height: int, width: int) -> tuple[list[Tensor], Tensor]:
    """Returns the inputs of the exported model, and the same images in the form that the original model reads.

    Images for detectors are slightly smaller than the input, so that the comparison covers padding.
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
    """Returns the detector with a lower score threshold, which some boxes exceed, and this threshold."""
    settings = getattr(graph.model, 'roi_head', graph.model.bbox_head).test_cfg
    settings.score_thr = 0.0
    scores = original(graph, pictures(graph, 1, height, width)[1])[1].sort(descending=True).values
    if len(scores) < 2:
        raise UserError(
            'No file was written: the model finds no boxes even with a score threshold of 0, so its outputs cannot be '
            'compared. Check that the checkpoint belongs to the config.'
        )
    # The threshold lies in the widest gap between the highest scores, so that rounding cannot move a score across it.
    first = scores[: 2 * OBJECTS]
    last = int((first[:-1] - first[1:]).argmax())
    settings.score_thr = float(first[last : last + 2].mean())
    return type(graph)(graph.model, graph.reads_bgr).eval().requires_grad_(False), settings.score_thr


def boxes_apart(want: list[Tensor], got: list[Tensor]) -> tuple[float, float]:
    """Returns the largest difference between boxes, in pixels, and the largest difference between scores or masks.

    Each box is compared with the nearest box of its class, because boxes with equal scores have no defined order.
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
    """Returns the largest share of an image's pixels in which a mask differs."""
    shown = (pasted(*one, *masks.shape[1:]) for one in zip(grids.numpy(), boxes.tolist(), strict=True))
    return max(float((a != b.numpy()).mean()) for a, b in zip(shown, masks, strict=True))


def original(graph: Graph, images: Tensor) -> list[Tensor]:
    """Computes the outputs of the original model with ``test_step``, as MMEngine's test loop does."""
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
    """Draws a ``height x width x 3`` RGB image with objects for a detector to find."""
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
