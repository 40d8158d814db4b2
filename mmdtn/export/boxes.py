"""Decodes the outputs of MMDetection's anchor heads into boxes, with operations that support dynamic image sizes."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.ops import nms

from mmdtn.errors import UserError

INSTEAD = 'Use --raw to export the outputs of the head instead.'
NMS_OPTIONS = {'type', 'iou_threshold', 'class_agnostic', 'split_thr'}  # split_thr only changes memory use


class Suppression:
    """Non-maximum suppression with the settings of a ``test_cfg``."""

    def __init__(self, cfg: Any) -> None:
        unknown = cfg.nms.keys() - NMS_OPTIONS
        if cfg.nms.type != 'nms' or unknown or cfg.get('min_bbox_size', -1) > 0:
            raise UserError(
                f'test_cfg has nms={dict(cfg.nms)} and min_bbox_size={cfg.get("min_bbox_size", -1)}, which cannot be '
                f"exported. Exported boxes support type='nms' with {', '.join(sorted(NMS_OPTIONS - {'type'}))}, and no "
                f'min_bbox_size above 0. {INSTEAD}'
            )
        self.limit, self.iou = cfg.max_per_img, cfg.nms.iou_threshold
        self.apart = not cfg.nms.get('class_agnostic', False)
        self.drops_empty = cfg.get('min_bbox_size', -1) == 0

    def __call__(self, boxes: Tensor, scores: Tensor, groups: Tensor, good: Tensor) -> Tensor:
        """Returns the indices of the kept boxes, sorted by score.

        Only ``good`` boxes are considered. A box is suppressed only by boxes of its own group.
        """
        if self.drops_empty:  # clipping at the border of the image can make boxes empty
            good = good & (boxes[:, 2:] > boxes[:, :2]).all(1)
        # Shift each group to its own region, so that boxes of different groups never overlap.
        moved = boxes + groups[:, None] * (boxes.max() + 1) * self.apart
        places = good.nonzero()[:, 0]
        kept = nms(moved.index_select(0, places), scores.index_select(0, places), self.iou)
        return places.index_select(0, kept[: self.limit])


class AnchorBoxes(nn.Module):
    """Computes the boxes, scores and labels of one image from the outputs of an anchor head and applies NMS.

    MMDetection's implementation branches on the number of boxes and cannot be exported. This module always keeps
    ``nms_pre`` candidates per level and drops candidates below the score threshold before NMS.

    With ``by_level``, a box is suppressed only by boxes of its own level, as in an RPN.
    """

    def __init__(self, head: Any, by_level: bool = False) -> None:
        super().__init__()
        check(head)
        self.anchors, self.coder, self.by_level = head.prior_generator, head.bbox_coder, by_level
        self.channels, self.sigmoid = head.cls_out_channels, head.use_sigmoid_cls
        self.candidates, self.score_thr = head.test_cfg.nms_pre, head.test_cfg.get('score_thr', 0.0)
        self.suppress = Suppression(head.test_cfg)

    def forward(self, scores: Sequence[Tensor], deltas: Sequence[Tensor], size: Tensor) -> tuple[Tensor, ...]:
        """Computes boxes, scores and labels. ``size`` is the height and width of the image without padding."""
        anchors = self.anchors.grid_priors([level.shape[-2:] for level in scores], scores[0].dtype, scores[0].device)
        levels = [self.best(*level) for level in zip(scores, deltas, anchors, strict=True)]
        found, labels, moved, start = (torch.cat(parts) for parts in zip(*levels, strict=True))
        boxes = decoded(self.coder, start, moved, size)
        groups = torch.arange(len(levels)).repeat_interleave(self.candidates) if self.by_level else labels
        kept = self.suppress(boxes, found, groups, found > self.score_thr)
        return boxes[kept], found[kept], labels[kept]

    def best(self, scores: Tensor, deltas: Tensor, anchors: Tensor) -> tuple[Tensor, ...]:
        """Returns the scores, labels, deltas and anchors of the best candidates on one level.

        The number of candidates does not depend on the size of the level.
        """
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
    """Raises an error if exported boxes would differ from those of ``head``."""
    from mmdet.models import AnchorHead
    from mmdet.models.task_modules import DeltaXYWHBBoxCoder

    name, coder = type(head).__name__, getattr(head, 'bbox_coder', None)
    if not isinstance(head, AnchorHead) or type(coder) is not DeltaXYWHBBoxCoder:
        raise UserError(f'{name} has no anchors with DeltaXYWHBBoxCoder, which exported boxes need. {INSTEAD}')
    if head.test_cfg.get('nms_pre', -1) <= 0:
        raise UserError(
            f'test_cfg.nms_pre={head.test_cfg.get("nms_pre")} does not limit the candidates, which exported boxes '
            'need. Set it to a positive number, such as 1000.'
        )
