"""The second stage of Faster and Mask R-CNN, with operations that support dynamic image sizes."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.ops import roi_align

from mmdtn.errors import UserError

from .boxes import Suppression, decoded


class RegionBoxes(nn.Module):
    """Computes the boxes, scores, labels and masks of one image from its proposals and applies NMS.

    The proposals, and the boxes for the mask head, are padded with zeros to their largest number, which fixes their
    shapes.
    """

    def __init__(self, head: Any, proposals: int) -> None:
        super().__init__()
        check(head)
        self.head, self.proposals = head, proposals
        self.suppress, self.score_thr = Suppression(head.test_cfg), head.test_cfg.score_thr

    def forward(self, maps: Sequence[Tensor], proposals: Tensor, size: Tensor) -> tuple[Tensor, ...]:
        head, count = self.head.bbox_head, proposals.shape[0]
        regions = filled(proposals, self.proposals)
        logits, deltas = head(regions_of(maps, regions, self.head.bbox_roi_extractor))
        scores = logits.softmax(-1)[:, :-1]
        classes = scores.shape[1]
        of_each = 1 if head.reg_class_agnostic else classes
        boxes = decoded(head.bbox_coder, regions.repeat_interleave(of_each, 0), deltas.reshape(-1, 4), size)
        boxes = boxes.view(-1, of_each, 4).expand(-1, classes, 4).reshape(-1, 4)
        labels = torch.arange(classes).repeat(self.proposals)
        good = (scores > self.score_thr) & (torch.arange(self.proposals) < count)[:, None]
        kept = self.suppress(boxes, scores.flatten(), labels, good.flatten())
        found = boxes[kept], scores.flatten()[kept], labels[kept]
        return (*found, self.masks(maps, found[0], found[2])) if self.head.with_mask else found

    def masks(self, maps: Sequence[Tensor], boxes: Tensor, labels: Tensor) -> Tensor:
        """Returns the ``N x 28 x 28`` mask probabilities on a grid over each box."""
        head, limit = self.head.mask_head, self.suppress.limit
        logits = head(regions_of(maps, filled(boxes, limit), self.head.mask_roi_extractor))
        channel = torch.zeros_like(labels) if head.class_agnostic else labels
        places = torch.arange(labels.shape[0])
        return logits[torch.arange(limit), filled(channel, limit)].sigmoid().index_select(0, places)


def filled(rows: Tensor, count: int) -> Tensor:
    """Pads a tensor with zeros to ``count`` rows."""
    return torch.cat((rows, rows.new_zeros(count, *rows.shape[1:]))).narrow(0, 0, count)


def regions_of(maps: Sequence[Tensor], boxes: Tensor, extractor: Any) -> Tensor:
    """Extracts the ``N x C x h x w`` features of boxes, each from the level that fits the size of the box.

    The features are computed on all levels and then selected. MMDetection's implementation scatters the features, an
    operation that cannot be exported to ONNX.
    """
    rois = torch.cat((boxes.new_zeros(len(boxes), 1), boxes), 1)
    level_of = extractor.map_roi_levels(rois, extractor.num_inputs)[:, None, None, None]
    regions = torch.zeros(())
    for level, layer in enumerate(extractor.roi_layers):
        own = roi_align(maps[level], rois, layer.output_size, layer.spatial_scale, layer.sampling_ratio, layer.aligned)
        regions = torch.where(level_of == level, own, regions)
    return regions


def check(head: Any) -> None:
    from mmdet.models.roi_heads import SingleRoIExtractor, StandardRoIHead
    from mmdet.models.task_modules import DeltaXYWHBBoxCoder

    extractors = [head.bbox_roi_extractor, *([head.mask_roi_extractor] if head.with_mask else [])]
    if (
        type(head) is not StandardRoIHead
        or head.with_shared_head
        or type(head.bbox_head.bbox_coder) is not DeltaXYWHBBoxCoder
        or (head.with_mask and head.test_cfg.mask_thr_binary != 0.5)
        or any(type(e) is not SingleRoIExtractor or type(e.roi_layers[0]).__name__ != 'RoIAlign' for e in extractors)
    ):
        raise UserError(
            f'{type(head).__name__} cannot be exported as it is configured. Use the second stage of Faster or Mask '
            'R-CNN with RoIAlign, DeltaXYWHBBoxCoder and mask_thr_binary=0.5.'
        )
