"""Small DINO models, random views and a plain implementation of k-NN for the tests."""

import numpy as np
import torch
from mmengine.registry import DATASETS, MODELS
from torch import nn
from torch.utils.data import Dataset

from mmdtn.selfsup import DINO

BACKBONE = dict(
    type='ViTDTN',
    arch=dict(width=16, depth=3, num_heads=2, mlp_ratio=2),
    dtn_layers=2,
    img_size=16,
    patch_size=4,
    drop_path_rate=0.0,
)
HEAD = dict(type='DINOHead', in_channels=16, out_channels=12, hidden_channels=20, bottleneck_channels=8)


def dino(**options) -> DINO:
    model = MODELS.build(dict(type='DINO', backbone=BACKBONE, head=HEAD) | options)
    model.init_weights()
    return model.train()


def views(images: int = 3, local: int = 2, generator: torch.Generator | None = None) -> list[torch.Tensor]:
    """Returns two views of 16 pixels and other views of 8 pixels."""
    return [torch.randn(images, 3, side, side, generator=generator) for side in [16, 16] + [8] * local]


@DATASETS.register_module()
class Views(Dataset):
    """Dataset whose views depend only on the index."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict:
        return dict(inputs=[view[0] for view in views(1, generator=torch.Generator().manual_seed(index))])


@MODELS.register_module()
class AsTheyAre(nn.Module):
    """Data preprocessor that returns views unchanged."""

    def forward(self, data: dict, training: bool) -> dict:
        return dict(data)


def one_after_the_other(queries, images, k, temperature):
    """Computes top-1 and top-5 accuracy in percent, with NumPy's sort and loops over queries and neighbours."""
    right = []
    for vector, label in zip(queries.vectors.numpy(), queries.labels.numpy(), strict=True):
        similarity = images.vectors.numpy() @ vector
        votes = {}
        for i in np.argsort(-similarity)[:k]:
            name = int(images.labels[i])
            votes[name] = votes.get(name, 0) + np.exp(similarity[i] / temperature)
        ranking = sorted(votes, key=votes.get, reverse=True)
        right.append((ranking[0] == label, label in ranking[:5]))
    return 100 * np.mean(right, 0)
