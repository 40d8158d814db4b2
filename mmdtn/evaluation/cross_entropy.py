"""Provides cross-entropy as a metric for classifiers, because MMPretrain does not."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from mmengine.evaluator import BaseMetric
from mmengine.registry import METRICS


@METRICS.register_module()
class CrossEntropy(BaseMetric):
    """Metric ``loss/cross_entropy``, the mean cross-entropy of a classifier's scores.

    Unlike a training loss, this metric never includes label smoothing, mixup or distillation.

    Example:
        val_evaluator = [dict(type='Accuracy'), dict(type='mmengine.CrossEntropy')]
    """

    default_prefix = 'loss'

    def process(self, data_batch: Any, data_samples: Sequence[dict]) -> None:
        for sample in data_samples:
            scores = sample['pred_score'].double()
            labels = sample['gt_label'].to(scores.device)
            if labels.numel() != 1:
                raise ValueError(f'CrossEntropy needs images with one label, but one has {labels.tolist()}.')
            # The logarithm of 0 is infinite, so replace such a score with the smallest normal number of float32.
            logs = scores.clamp(min=torch.finfo(torch.float32).tiny).log()
            self.results.append(F.nll_loss(logs[None], labels.view(1)).item())

    def compute_metrics(self, results: list) -> dict[str, float]:
        return dict(cross_entropy=sum(results) / len(results))
