"""Detector for tests of the evaluation. It returns moved annotations, leaves some out and invents others."""

import torch
from mmdet.registry import MODELS
from mmdet.structures.bbox import get_box_tensor
from mmengine.model import BaseModel
from mmengine.structures import InstanceData


@MODELS.register_module()
class Oracle(BaseModel):
    def __init__(self, masks=False, data_preprocessor=None):
        super().__init__(data_preprocessor)
        self.masks = masks
        self.unused = torch.nn.Parameter(torch.zeros(1))

    def forward(self, inputs, data_samples=None, mode='predict'):
        return [self.see(sample) for sample in data_samples]

    def see(self, sample):
        random = torch.Generator().manual_seed(int(sample.img_id))
        truth = sample.gt_instances
        height, width = sample.ori_shape
        boxes = get_box_tensor(truth.bboxes)  # loaded after the image was resized, so in pixels of the original image
        boxes = torch.cat((boxes, boxes.flip(0) * 0.8))[: len(boxes) + 2]
        boxes = (boxes + torch.randn(boxes.shape, generator=random) * 1.5).clamp(min=0)
        boxes[:, 2::2].clamp_(max=width)
        boxes[:, 3::2].clamp_(max=height)
        labels = torch.cat((truth.labels, truth.labels.flip(0)))[: len(boxes)]
        seen = torch.rand(len(boxes), generator=random) < 0.9
        found = InstanceData(bboxes=boxes, labels=labels, scores=torch.rand(len(boxes), generator=random))
        if self.masks:
            x, y = torch.arange(width) + 0.5, torch.arange(height)[:, None] + 0.5
            left, top, right, bottom = boxes.T[:, :, None, None]
            ellipse = ((2 * x - left - right) / (right - left)) ** 2 + ((2 * y - top - bottom) / (bottom - top)) ** 2
            found.masks = ellipse < 1
        sample.pred_instances = found[seen]
        return sample
