"""A very small training run with a random order, random augmentation and dropout."""

import random
import uuid

import numpy as np
import torch
from mmengine.evaluator import BaseMetric
from mmengine.hooks import Hook
from mmengine.model import BaseModel
from mmengine.runner import Runner
from torch import nn
from torch.utils.data import Dataset

from mmdtn.engine.hooks import PendingGradientsHook, WholeCheckpointHook


class Noisy(Dataset):
    """Dataset whose samples depend on their index and on each random generator."""

    def __init__(self, length=10):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        noise = torch.tensor([random.random(), np.random.rand(), torch.rand(()).item(), 1.0])
        return dict(inputs=noise + torch.tensor([index, 0.0, 0.0, 0.0]))


class Toy(BaseModel):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))

    def forward(self, inputs, mode='loss'):
        output = self.layers(torch.stack(inputs))
        return dict(loss=output.square().mean()) if mode == 'loss' else [output]


class Validated(BaseMetric):
    """Hook that calls a function at the end of each validation."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def process(self, data_batch, data_samples):
        self.results.append(0)

    def compute_metrics(self, results):
        self.function()
        return dict(acc=1.0)


class Watch(Hook):
    """Hook that records the samples of each iteration."""

    priority = 'LOWEST'

    def __init__(self):
        self.seen = []

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        self.seen.append((runner.epoch, batch_idx, torch.stack(data_batch['inputs'])))


def train(
    work_dir,
    load_from=None,
    loop=dict(type='ResumableEpochLoop', max_epochs=3),  # noqa: B006  # never modified
    sampler='DefaultSampler',
    workers=0,
    accumulate=1,
    length=10,
    seed=5,
    interval=2,
    by_epoch=False,
    hooks=(),
    validate=None,
    **checkpoint,
):
    """Trains, and returns the runner and its Watch. ``validate`` is called in each validation."""
    watch = Watch()
    loader = dict(
        dataset=Noisy(length),
        sampler=dict(type=sampler, shuffle=True),
        batch_size=2,
        num_workers=workers,
        persistent_workers=workers > 0,
    )
    evaluation = (
        {}
        if validate is None
        else dict(
            val_dataloader=dict(dataset=Noisy(1), sampler=dict(type='DefaultSampler'), batch_size=1),
            val_cfg=dict(),
            val_evaluator=[Validated(validate)],
        )
    )
    checkpoint = WholeCheckpointHook(interval=interval, by_epoch=by_epoch, **checkpoint)
    runner = Runner(
        dict(type=Toy),  # built after the seed is set
        str(work_dir),
        train_dataloader=loader,
        train_cfg=dict(loop),
        optim_wrapper=dict(optimizer=dict(type='Adam', lr=0.1), accumulative_counts=accumulate),
        param_scheduler=dict(type='ExponentialLR', gamma=0.9, by_epoch=False),
        default_hooks=dict(checkpoint=checkpoint),
        custom_hooks=[PendingGradientsHook(), watch, *hooks],
        **evaluation,
        load_from=None if load_from is None else str(load_from),
        resume=load_from is not None,
        randomness=dict(seed=seed),
        log_level='ERROR',
        experiment_name=uuid.uuid4().hex,  # mmengine has one message hub for each name
        cfg=dict(work_dir=str(work_dir)),
    )
    runner.train()
    if workers:  # the garbage collector would wait for the workers in vain
        runner.train_dataloader._iterator = None
        getattr(runner.train_loop, 'dataloader_iterator', runner).iterator = None
    return runner, watch
