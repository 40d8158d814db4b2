"""Metric that computes the accuracy of each exit in a cascade."""

from collections.abc import Sequence
from typing import Any

import torch
from mmengine.evaluator import BaseMetric
from mmengine.registry import METRICS
from torch import Tensor


@METRICS.register_module()
class ExitAccuracy(BaseMetric):
    """Computes the accuracy in percent of each exit of a :class:`DVT`.

    Without thresholds, ``exit1/top1`` and so on are the accuracies of the exits. ``accuracy/top1``, ``accuracy/top5``
    and ``accuracy/loss`` belong to the last exit.

    With thresholds, images leave early, and ``accuracy/top1`` is the accuracy of the predictions. ``exit1/share`` and
    so on are the shares of the images that leave at each exit, and ``gflops`` is the mean cost of an image.

    Args:
        gflops: The cost of an image that leaves at each exit, as ``tools/analysis_tools/get_flops.py`` prints it.
        collect_device: Device on which the results of all processes are collected, ``'cpu'`` or ``'gpu'``.
        prefix: Prefix of all metric names.
    """

    def __init__(
        self, gflops: Sequence[float] | None = None, collect_device: str = 'cpu', prefix: str | None = None
    ) -> None:
        super().__init__(collect_device, prefix)
        self.gflops = gflops

    def process(self, data_batch: Any, data_samples: Sequence[dict]) -> None:
        for sample in data_samples:
            label, score = int(sample['gt_label']), sample['pred_score']
            result = dict(
                exit=sample['exit'],
                hit=int(sample['pred_label']) == label,
                top5=bool((score > score[label]).sum() < 5),
                loss=-float(score[label].clamp_min(torch.finfo(score.dtype).tiny).log()),
            )
            if 'exit_conf' in sample:
                result |= dict(conf=sample['exit_conf'].cpu(), hits=(sample['exit_label'] == label).cpu())
            self.results.append(result)

    def compute_metrics(self, results: list[dict]) -> dict[str, float]:
        metrics = {'accuracy/top1': _percent([r['hit'] for r in results])}
        if 'hits' in results[0]:
            _, hits = confidences(results)
            metrics |= {f'exit{k}/top1': _percent(row) for k, row in enumerate(hits, 1)}
            metrics['accuracy/top5'] = _percent([r['top5'] for r in results])
            metrics['accuracy/loss'] = sum(r['loss'] for r in results) / len(results)
            return metrics
        taken = torch.tensor([r['exit'] for r in results])
        exits = len(self.gflops) if self.gflops else int(taken.max())
        share = [(taken == k).double().mean().item() for k in range(1, exits + 1)]
        metrics |= {f'exit{k}/share': 100 * s for k, s in enumerate(share, 1)}
        if self.gflops:
            metrics['gflops'] = sum(s * g for s, g in zip(share, self.gflops, strict=True))
        return metrics


def confidences(results: Sequence[dict]) -> tuple[Tensor, Tensor]:
    """Returns the ``K x N`` tensors ``conf`` and ``hit`` for the functions in :mod:`mmdtn.dvt.budget`."""
    return torch.stack([r['conf'] for r in results], 1), torch.stack([r['hits'] for r in results], 1)


def _percent(hits: Any) -> float:
    return 100 * torch.as_tensor(hits).double().mean().item()
