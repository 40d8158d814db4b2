"""The loss on test pictures, which MMPretrain's metrics leave out."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from mmengine.evaluator import BaseMetric
from mmengine.registry import METRICS


@METRICS.register_module()
class CrossEntropy(BaseMetric):
    """Mean cross-entropy of a classifier's scores, ``loss/cross_entropy``: ``val_evaluator=[..., dict(type=...)]``.

    Of the classes alone: without the smoothing, mixing or distillation that a training loss may have.
    """

    default_prefix = 'loss'

    def process(self, data_batch: Any, data_samples: Sequence[dict]) -> None:
        for sample in data_samples:
            scores = sample['pred_score'].double()
            labels = sample['gt_label'].to(scores.device)
            if labels.numel() != 1:
                raise ValueError(f'CrossEntropy wants pictures of one class, but one has {labels.tolist()}.')
            # A share of 0 in float32 has an infinite logarithm; its smallest normal number is as bad as can be told.
            logs = scores.clamp(min=torch.finfo(torch.float32).tiny).log()
            self.results.append(F.nll_loss(logs[None], labels.view(1)).item())

    def compute_metrics(self, results: list) -> dict[str, float]:
        return dict(cross_entropy=sum(results) / len(results))
