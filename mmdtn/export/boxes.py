"""What an anchor head of MMDetection computes, as boxes: in operations that every size of image shares."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.ops import nms

from mmdtn.errors import UserError

INSTEAD = 'Export what the head computes, with --raw.'
NMS_OPTIONS = {'type', 'iou_threshold', 'class_agnostic', 'split_thr'}  # the last changes memory alone


class Suppression:
    """Non-maximum suppression with the settings of a ``test_cfg``."""

    def __init__(self, cfg: Any) -> None:
        unknown = cfg.nms.keys() - NMS_OPTIONS
        if cfg.nms.type != 'nms' or unknown or cfg.get('min_bbox_size', -1) > 0:
            raise UserError(
                f'test_cfg has nms={dict(cfg.nms)}, min_bbox_size={cfg.get("min_bbox_size", -1)}: exported boxes have '
                f"type='nms' with {', '.join(sorted(NMS_OPTIONS - {'type'}))}, and no smallest size. {INSTEAD}"
            )
        self.limit, self.iou = cfg.max_per_img, cfg.nms.iou_threshold
        self.apart = not cfg.nms.get('class_agnostic', False)
        self.drops_empty = cfg.get('min_bbox_size', -1) == 0

    def __call__(self, boxes: Tensor, scores: Tensor, groups: Tensor, good: Tensor) -> Tensor:
        """The places of those ``good`` boxes that no better one of their group covers, the best first."""
        if self.drops_empty:  # such as were clipped to a line at the edge
            good = good & (boxes[:, 2:] > boxes[:, :2]).all(1)
        # Groups side by side, so that no box covers one of another.
        moved = boxes + groups[:, None] * (boxes.max() + 1) * self.apart
        places = good.nonzero()[:, 0]
        kept = nms(moved.index_select(0, places), scores.index_select(0, places), self.iou)
        return places.index_select(0, kept[: self.limit])


class AnchorBoxes(nn.Module):
    """Scores and deltas of each level, of one image, to boxes, scores and labels after non-maximum suppression.

    MMDetection's own branches on numbers of boxes. Here each level has ``nms_pre`` candidates, of which those below the
    threshold are dropped at once.

    ``by_level``: only boxes of one level suppress each other, as an RPN has it.
    """

    def __init__(self, head: Any, by_level: bool = False) -> None:
        super().__init__()
        check(head)
        self.anchors, self.coder, self.by_level = head.prior_generator, head.bbox_coder, by_level
        self.channels, self.sigmoid = head.cls_out_channels, head.use_sigmoid_cls
        self.candidates, self.score_thr = head.test_cfg.nms_pre, head.test_cfg.get('score_thr', 0.0)
        self.suppress = Suppression(head.test_cfg)

    def forward(self, scores: Sequence[Tensor], deltas: Sequence[Tensor], size: Tensor) -> tuple[Tensor, ...]:
        """``size``: height and width of the image, without what it was padded with."""
        anchors = self.anchors.grid_priors([level.shape[-2:] for level in scores], scores[0].dtype, scores[0].device)
        levels = [self.best(*level) for level in zip(scores, deltas, anchors, strict=True)]
        found, labels, moved, start = (torch.cat(parts) for parts in zip(*levels, strict=True))
        boxes = decoded(self.coder, start, moved, size)
        groups = torch.arange(len(levels)).repeat_interleave(self.candidates) if self.by_level else labels
        kept = self.suppress(boxes, found, groups, found > self.score_thr)
        return boxes[kept], found[kept], labels[kept]

    def best(self, scores: Tensor, deltas: Tensor, anchors: Tensor) -> tuple[Tensor, ...]:
        """The candidates of one level, as many whatever its size: scores, labels, deltas and anchors."""
        scores = scores[0].permute(1, 2, 0).reshape(-1, self.channels)
        scores = scores.sigmoid() if self.sigmoid else scores.softmax(-1)[:, :-1]
        classes = scores.shape[1]
        found, index = torch.cat((scores.flatten(), scores.new_full((self.candidates,), -1))).topk(self.candidates)
        place = (index // classes).clamp(max=scores.shape[0] - 1)
        deltas = deltas[0].permute(1, 2, 0).reshape(-1, 4)
        return found, index % classes, deltas.index_select(0, place), anchors.index_select(0, place)


def decoded(coder: Any, start: Tensor, deltas: Tensor, size: Tensor) -> Tensor:
    boxes = coder.decode(start, deltas)
    return boxes.clamp(min=0).minimum(size.flip(0).repeat(2).to(boxes)) if coder.clip_border else boxes


def check(head: Any) -> None:
    """A sentence where these boxes would not be those of ``head``."""
    from mmdet.models import AnchorHead
    from mmdet.models.task_modules import DeltaXYWHBBoxCoder

    name, coder = type(head).__name__, getattr(head, 'bbox_coder', None)
    if not isinstance(head, AnchorHead) or type(coder) is not DeltaXYWHBBoxCoder:
        raise UserError(f'{name} has no anchors with DeltaXYWHBBoxCoder, which exported boxes need. {INSTEAD}')
    if head.test_cfg.get('nms_pre', -1) <= 0:
        raise UserError(f'test_cfg.nms_pre={head.test_cfg.get("nms_pre")}: exported boxes need a number of candidates.')
