"""Evaluates a cascade on a dataset: collects the predictions of all exits, and measures the speed of early exit."""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from mmengine.config import Config
from mmengine.device import get_device
from mmengine.registry import DATASETS, MODELS
from mmengine.runner import Runner
from torch import Tensor
from torch.utils.data import DataLoader

from mmdtn import checkpoints
from mmdtn.errors import UserError
from mmdtn.models import build
from mmdtn.registry import class_of

from .budget import exits_taken
from .classifier import DVT


def load_cascade(cfg: Config, checkpoint: str) -> DVT:
    """Builds the cascade of a config, and loads all weights from a checkpoint of DVT's authors or of this package."""
    kind = class_of(cfg.model, MODELS)
    if not issubclass(kind, DVT):
        raise UserError(f'The model of the config is a {kind.__name__}, which has no exits. Use a config with a DVT.')
    model = build(cfg, init_cfg=None, thresholds=None)
    try:
        state, _ = checkpoints.translate(checkpoints.read(checkpoint), model)
    except ValueError as error:
        raise UserError(f'{checkpoint} does not fit: {error}') from None
    model.load_state_dict(state)
    return model.to(get_device())


def build_loader(cfg: Config, name: str, images: int | None = None, seed: int = 0) -> DataLoader:
    """Builds a data loader of the config that reads images in the order of the dataset.

    Args:
        cfg: The config.
        name: Key of the data loader in the config.
        images: Number of images to draw at random, or None for all.
        seed: Seed of the random draw.
    """
    if name not in cfg:
        raise UserError(f'The config has no {name}. See the configs in configs/dvt for examples.')
    settings = dict(cfg[name], sampler=dict(type='DefaultSampler', shuffle=False))
    dataset = DATASETS.build(settings['dataset'])
    dataset.full_init()
    if images is not None and images < len(dataset):
        order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(seed))
        dataset.get_subset_(order[:images].tolist())
    return Runner.build_dataloader(dict(settings, dataset=dataset), seed=seed)


class Answers(NamedTuple):
    """``K x N`` tensors with the confidence and correctness of each exit's prediction for each image.

    ``conf`` is the largest probability, and ``hit`` tells whether its class is correct.
    """

    conf: Tensor
    hit: Tensor


@torch.no_grad()
def answers(model: DVT, loader: Iterable[Any]) -> Answers:
    """Runs every exit on every image, regardless of thresholds."""
    model.eval()
    found = [Answers(*_judge(model.logits(images), labels)) for images, labels in _batches(model, loader)]
    return Answers(torch.cat([a.conf for a in found], 1), torch.cat([a.hit for a in found], 1))


class Race(NamedTuple):
    """Speeds of all exits and of early exit, in images per second, and early exit's accuracy in percent."""

    all_exits: float
    leaving_early: float
    accuracy: float
    differing: int  # images whose exit differs from exits_taken() because of rounding near a threshold


@torch.no_grad()
def race(model: DVT, loader: Iterable[Any], thresholds: Tensor) -> list[Race]:
    """Compares the speeds of early exit and full computation for each row of thresholds.

    Early exit and full computation take turns on the same batches. Times exclude loading and preprocessing images.
    """
    model.eval()
    rows: list[Sequence[float]] = [row[:-1].tolist() for row in thresholds]
    seconds = torch.zeros(len(rows), 2, dtype=torch.double)
    right, differing = [0] * len(rows), [0] * len(rows)
    before, images_seen, first = model.thresholds, 0, True
    for images, labels in _batches(model, loader):
        images_seen += len(images)
        for i, row in enumerate(rows):
            model.thresholds = tuple(row)
            if first:  # warm-up
                model.logits(images), model.leave_early(images)
            all_seconds, logits = _timed(lambda: model.logits(images))  # noqa: B023  # called immediately
            early_seconds, (scores, numbers) = _timed(lambda: model.leave_early(images))  # noqa: B023
            seconds[i] += torch.tensor([all_seconds, early_seconds])
            conf, _ = _judge(logits, labels)
            right[i] += int((scores.cpu().argmax(1) == labels).sum())
            differing[i] += int((exits_taken(conf, thresholds[i : i + 1])[0] + 1 != numbers.cpu()).sum())
        first = False
    model.thresholds = before
    speeds = (images_seen / seconds).tolist()
    return [
        Race(every, early, 100 * hits / images_seen, others)
        for (every, early), hits, others in zip(speeds, right, differing, strict=True)
    ]


def _batches(model: DVT, loader: Iterable[Any]) -> Iterable[tuple[Tensor, Tensor]]:
    """Yields the images of each batch on the model's device and the labels on the CPU."""
    for batch in loader:
        data = model.data_preprocessor(batch, training=False)
        yield data['inputs'], torch.cat([sample.gt_label for sample in data['data_samples']]).cpu()


def _judge(logits: Sequence[Tensor], labels: Tensor) -> tuple[Tensor, Tensor]:
    conf, answer = torch.stack([x.float().softmax(-1) for x in logits]).max(-1)
    return conf.cpu(), answer.cpu() == labels


def _timed(run: Callable[[], Any]) -> tuple[float, Any]:
    _wait()
    start = time.perf_counter()
    result = run()
    _wait()
    return time.perf_counter() - start, result


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
