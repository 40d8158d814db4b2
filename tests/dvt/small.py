"""Small cascades of both families, and images for them."""

import torch
from mmpretrain.structures import DataSample

from mmdtn.dvt import DVT

from ..backbones.helpers import randomised

ARCHS = {
    't2t': dict(arch=dict(base='t2t-12', width=48, depth=2, num_heads=3), grids=(2, 3, 4), img_size=64),
    'deit': dict(arch=dict(base='deit-s', width=48, depth=2, num_heads=3), grids=(3, 4, 7), img_size=28),
}


def small(family: str = 'deit', **options) -> DVT:
    return DVT(**ARCHS[family] | dict(num_classes=7, drop_path_rate=0.0) | options)


def drawn(family: str = 'deit', **options) -> DVT:
    """Returns a model in evaluation mode, with weights that make predictions differ between images."""
    model = randomised(small(family, **options))
    with torch.no_grad():
        for exit in model.exits:
            exit.head.weight.mul_(8)
    return model


def images(family: str = 'deit', number: int = 2) -> torch.Tensor:
    side = ARCHS[family]['img_size']
    return torch.randn(number, 3, side, side, generator=torch.Generator().manual_seed(number))


def samples(number: int, mixed: bool = False) -> list[DataSample]:
    """Returns data samples with labels, or with scores as for mixed images."""
    labels = torch.arange(number) % 7
    if not mixed:
        return [DataSample().set_gt_label(label) for label in labels]
    scores = 0.7 * torch.eye(7)[labels] + 0.3 * torch.eye(7)[labels.flip(0)]
    return [DataSample().set_gt_score(score) for score in scores]
