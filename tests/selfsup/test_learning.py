"""DINO learns the classes of generated images without labels. The class is the direction of stripes."""

import math
import uuid

import pytest
import torch
import torch.nn.functional as F
from mmengine.registry import MODELS
from mmengine.runner import Runner
from torch.utils.data import Dataset

from mmdtn.selfsup import DINOHook, Features, accuracy

from .small import HEAD

CLASSES, SIDE = 6, 24


def stripes(label, generator):
    """Returns stripes of -1 and 1 in a given direction, with random phase and frequency."""
    angle = math.pi * label / CLASSES
    frequency, phase = 0.8 + 0.6 * torch.rand((), generator=generator), 7 * torch.rand((), generator=generator)
    y, x = torch.meshgrid(torch.arange(float(SIDE)), torch.arange(float(SIDE)), indexing='ij')
    return torch.sin(frequency * (x * math.cos(angle) + y * math.sin(angle)) + phase).sign()


def view(waves, side, generator):
    """Returns a crop in random colours with noise."""
    top, left = torch.randint(SIDE - side + 1, (2,), generator=generator).tolist()
    contrast, background = 1 + 0.3 * torch.randn(2, 3, 1, 1, generator=generator)
    sign = torch.randint(2, (), generator=generator) * 2 - 1
    noise = torch.randn(3, side, side, generator=generator)
    return sign * contrast * waves[top : top + side, left : left + side] + background - 1 + 0.3 * noise


class Stripes(Dataset):
    """Returns two views of 16 pixels and two views of 8 pixels."""

    def __len__(self):
        return 64 * 200

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        waves = stripes(index % CLASSES, generator)
        return dict(inputs=[view(waves, side, generator) for side in (16, 16, 8, 8)])


def pictures(number, first):
    generators = [torch.Generator().manual_seed(first + i) for i in range(number)]
    labels = torch.arange(number) % CLASSES
    return torch.stack([view(stripes(n, g), 16, g) for n, g in zip(labels.tolist(), generators, strict=True)]), labels


@torch.no_grad()
def neighbours_are_right(model, images, queries):
    """Returns the accuracy of 20-NN in percent."""
    sets = [Features(F.normalize(model(x)[0], dim=1), labels) for x, labels in (queries, images)]
    return accuracy(*sets, (20,))[20][0]


@pytest.mark.slow
def test_the_teacher_learns_the_direction_of_stripes(tmp_path):
    torch.manual_seed(0)
    backbone = dict(
        type='ViTDTN',
        arch=dict(width=32, depth=3, num_heads=4, mlp_ratio=2),
        dtn_layers=2,
        cls_from=2,
        img_size=16,
        patch_size=4,
        drop_path_rate=0.0,
        init_cfg=[dict(type='Xavier', layer='Linear', distribution='uniform')],
    )
    head = dict(HEAD, in_channels=32, out_channels=64, hidden_channels=64, bottleneck_channels=32)
    preprocessor = dict(type='AsTheyAre')
    model = MODELS.build(
        dict(type='DINO', backbone=backbone, head=head, teacher_momentum=0.95, data_preprocessor=preprocessor)
    )
    model.init_weights()
    sets = pictures(120, 10**6), pictures(300, 2 * 10**6)
    untrained = neighbours_are_right(model.eval(), *sets)
    runner = Runner(
        model,
        str(tmp_path),
        train_dataloader=dict(
            dataset=Stripes(),
            sampler=dict(type='DefaultSampler', shuffle=True),
            batch_size=64,
            collate_fn=dict(type='default_collate'),
        ),
        train_cfg=dict(type='ResumableLoop', max_iters=150, val_interval=1000),
        optim_wrapper=dict(optimizer=dict(type='AdamW', lr=1e-3, weight_decay=0.04)),
        param_scheduler=[
            dict(type='LinearLR', start_factor=1e-3, by_epoch=False, end=20),
            dict(type='CosineAnnealingLR', by_epoch=False, begin=20),
        ],
        custom_hooks=[DINOHook(frozen_last_layer=0)],
        randomness=dict(seed=0),
        log_level='ERROR',
        experiment_name=uuid.uuid4().hex,
    )
    runner.train()
    trained = neighbours_are_right(model.eval(), *sets)
    assert untrained < 50 and trained > untrained + 20
