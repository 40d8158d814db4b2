"""Linear evaluation of a pre-trained backbone, with several learning rates in one run."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from mmengine.evaluator import BaseMetric
from mmengine.model import BaseModel, BaseModule
from mmengine.registry import METRICS, MODELS
from torch import Tensor, nn

# Maps each feature type to the backbone's options and its number of output vectors.
FEATURES: dict[str, tuple[dict[str, Any], int]] = {
    'cls+mean': (dict(out_type='cls+mean'), 2),
    'last4': (dict(out_type='cls_token', out_indices=(-4, -3, -2, -1)), 4),
}
TOP = 5


class Probes(BaseModule):
    """Linear classifiers that share an input, one for each learning rate."""

    def __init__(self, in_channels: int, num_classes: int, number: int) -> None:
        super().__init__()
        self.num_classes = num_classes
        probes = [nn.Linear(in_channels, num_classes) for _ in range(number)]
        for probe in probes:
            nn.init.normal_(probe.weight, std=0.01)
            nn.init.zeros_(probe.bias)
        self.probes = nn.ModuleList(probes)

    def forward(self, x: Tensor) -> list[Tensor]:
        return [probe(x) for probe in self.probes]


@MODELS.register_module()
class LinearProbe(BaseModel):
    """Trains linear classifiers on a frozen backbone, one for each learning rate.

    The parameter names of classifier ``i`` start with ``head.probes.i.``. The optimizer wrapper's ``paramwise_cfg``
    must set the learning rate of each classifier. The log shows one loss for each learning rate.

    Args:
        backbone: Config of a ``ViTDTN`` or ``T2TViTDTN``. ``features`` determines its output.
        num_classes: Number of classes.
        rates: Learning rates, which are part of the names of the losses.
        features: ``'cls+mean'`` uses the class token and the mean of the patch tokens of the last block. ``'last4'``
            uses the class tokens of the last four blocks, so the class token has to join before these blocks.
    """

    def __init__(
        self,
        backbone: dict,
        num_classes: int,
        rates: Sequence[float],
        features: str = 'cls+mean',
        data_preprocessor: dict | nn.Module | None = None,
        init_cfg: dict | None = None,
    ) -> None:
        super().__init__(data_preprocessor, init_cfg)
        if features not in FEATURES:
            raise ValueError(f'features={features!r} does not exist. Choose one of {list(FEATURES)}.')
        options, vectors = FEATURES[features]
        self.backbone = MODELS.build(dict(backbone, **options)).requires_grad_(False)
        self.head = Probes(vectors * self.backbone.num_features, num_classes, len(rates))
        self.rates = tuple(rates)

    def train(self, mode: bool = True) -> 'LinearProbe':
        super().train(mode)
        self.backbone.eval()
        return self

    def forward(self, inputs: Tensor, data_samples: list | None = None, mode: str = 'tensor') -> Any:
        with torch.no_grad():
            features = torch.cat(self.backbone(inputs), 1)
        logits = self.head(features)
        if mode == 'tensor':
            return logits
        assert data_samples is not None
        if mode == 'loss':
            labels = torch.cat([sample.gt_label for sample in data_samples]).to(inputs.device)
            losses = [F.cross_entropy(each.float(), labels) for each in logits]
            return {f'loss_{rate:g}': loss for rate, loss in zip(self.rates, losses, strict=True)}
        best = torch.stack([each.topk(min(TOP, each.shape[1])).indices for each in logits], 1)
        for sample, labels in zip(data_samples, best, strict=True):
            sample.set_field(labels, 'probe_labels')  # rates x 5, most likely class first
        return data_samples


@METRICS.register_module()
class ProbeAccuracy(BaseMetric):
    """Metric for the accuracy of each classifier of :class:`LinearProbe`.

    The metrics ``accuracy/top1``, ``accuracy/top5`` and ``best_rate`` are the accuracies and the learning rate of the
    classifier with the highest top-1 accuracy.

    Args:
        rates: Learning rates of the model.
    """

    def __init__(self, rates: Sequence[float], **options: Any) -> None:
        super().__init__(**options)
        self.rates = tuple(rates)

    def process(self, data_batch: Any, data_samples: Sequence[dict]) -> None:
        for sample in data_samples:
            right = sample['probe_labels'] == sample['gt_label'].to(sample['probe_labels'].device)
            self.results.append((right[:, 0].tolist(), right.any(1).tolist()))

    def compute_metrics(self, results: list) -> dict[str, float]:
        top1, top5 = (100 * torch.tensor(each).double().mean(0) for each in zip(*results, strict=True))
        best = int(top1.argmax())
        found = {'accuracy/top1': float(top1[best]), 'accuracy/top5': float(top5[best]), 'best_rate': self.rates[best]}
        return found | {f'accuracy/top1_{rate:g}': float(value) for rate, value in zip(self.rates, top1, strict=True)}
