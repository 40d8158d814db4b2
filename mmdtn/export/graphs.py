"""Modules for export. They compute scores, boxes or raw outputs from RGB images with values from 0 to 255."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from mmdtn.errors import UserError
from mmdtn.registry import package_of

from .boxes import AnchorBoxes
from .inputs import turns_colours
from .regions import RegionBoxes


class Graph(nn.Module):
    """A model together with the normalisation of its data preprocessor.

    ``reads_bgr`` tells whether the data preprocessor takes BGR images.
    """

    task: str
    outputs: tuple[str, ...]
    mean: Tensor
    std: Tensor

    def __init__(self, model: Any, reads_bgr: bool) -> None:
        super().__init__()
        self.model, self.reads_bgr = model, reads_bgr
        preprocessor = model.data_preprocessor
        self.register_buffer('mean', getattr(preprocessor, 'mean', torch.zeros(1, 1, 1)).clone())
        self.register_buffer('std', getattr(preprocessor, 'std', torch.ones(1, 1, 1)).clone())
        self.takes_bgr = reads_bgr != turns_colours(preprocessor, self.mean, self.std)

    def normalised(self, image: Tensor) -> Tensor:
        return ((image.flip(1) if self.takes_bgr else image) - self.mean) / self.std

    def names(self, found: Any) -> list[str]:
        """Returns the names of the tensors that ``forward`` returned."""
        return list(self.outputs)

    def padding(self) -> list[float]:
        """Returns the RGB colour that normalisation turns into the model's padding value."""
        colour = (self.mean + self.model.data_preprocessor.pad_value * self.std).flatten().expand(3).tolist()
        return colour[::-1] if self.takes_bgr else colour


class Classifier(Graph):
    task, outputs = 'classification', ('scores',)

    def forward(self, image: Tensor) -> tuple[Tensor]:
        logits = self.model(self.normalised(image), mode='tensor')
        if not isinstance(logits, Tensor):
            raise UserError(
                f'{type(self.model).__name__} returns more than one tensor of logits. Use --raw to export them.'
            )
        return (logits.softmax(-1),)


class Detector(Graph):
    task, outputs = 'detection', ('boxes', 'scores', 'labels')

    def __init__(self, model: Any, reads_bgr: bool) -> None:
        super().__init__(model, reads_bgr)
        self.boxes = AnchorBoxes(model.bbox_head)

    def forward(self, image: Tensor, size: Tensor) -> tuple[Tensor, ...]:
        levels = self.model(self.normalised(image), mode='tensor')
        if len(levels) != 2:
            raise UserError(
                f'{type(self.model.bbox_head).__name__} returns {len(levels)} maps per level, but exported boxes are '
                'computed from two maps, scores and deltas. Use --raw to export the outputs of the head instead.'
            )
        return self.boxes(*levels, size)


class TwoStages(Graph):
    task = 'detection'

    def __init__(self, model: Any, reads_bgr: bool) -> None:
        super().__init__(model, reads_bgr)
        self.first = AnchorBoxes(model.rpn_head, by_level=True)
        self.second = RegionBoxes(model.roi_head, model.rpn_head.test_cfg.max_per_img)
        self.outputs = ('boxes', 'scores', 'labels', 'masks') if model.with_mask else ('boxes', 'scores', 'labels')

    def forward(self, image: Tensor, size: Tensor) -> tuple[Tensor, ...]:
        maps = self.model.extract_feat(self.normalised(image))
        proposals, _, _ = self.first(*self.model.rpn_head(maps), size)
        return self.second(maps, proposals, size)


class Raw(Graph):
    """Computes the outputs of a single-stage detector's head, or the logits of a classifier."""

    task = 'raw'

    def forward(self, image: Tensor) -> Any:
        return self.model(self.normalised(image), mode='tensor')

    def names(self, found: Any) -> list[str]:
        return [name for name, _ in flattened(found, 'output')]


def flattened(found: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors of nested tuples and lists, named by their positions, such as ``output_0_2``."""
    if isinstance(found, Tensor):
        yield name, found
        return
    for i, part in enumerate(found):
        yield from flattened(part, f'{name}_{i}')


def graph_of(model: Any, reads_bgr: bool, raw: bool) -> Graph:
    kind, package = type(model).__name__, package_of(type(model))
    if package == 'mmpretrain' and hasattr(model, 'head'):
        return Raw(model, reads_bgr) if raw else Classifier(model, reads_bgr)
    from mmdet.models import SingleStageDetector, TwoStageDetector

    if isinstance(model, TwoStageDetector) and model.with_rpn and not raw:
        return TwoStages(model, reads_bgr)
    if not isinstance(model, SingleStageDetector):
        raise UserError(
            f'{kind} cannot be exported. Supported models are classifiers of MMPretrain, and single-stage detectors '
            f'such as RetinaNet, Faster R-CNN and Mask R-CNN of MMDetection{" (the R-CNNs without --raw)" * raw}.'
        )
    return Raw(model, reads_bgr) if raw else Detector(model, reads_bgr)
