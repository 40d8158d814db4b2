"""Validation loop that classifies images by k nearest neighbours."""

from collections.abc import Sequence
from typing import Any

import torch
from mmengine.dist import is_main_process
from mmengine.model import is_model_wrapper
from mmengine.registry import LOOPS
from mmengine.runner import Runner, ValLoop, autocast

from mmdtn import checkpoints

from .knn import Features, accuracy, extract, features_of, joined


@LOOPS.register_module()
class KNNLoop(ValLoop):
    """Validation loop that classifies images by their k nearest neighbours among labelled images.

    For k = 20, for example, the metrics are ``accuracy/20-NN`` and ``accuracy/20-NN_top5`` in percent. Set
    ``val_evaluator=[]``, because the loop needs no evaluator. All loaders need
    ``collate_fn=dict(type='default_collate')``.

    Args:
        bank: Config of the loader of labelled images, with test transforms and without shuffling.
        ks: Numbers of neighbours.
        temperature: Temperature of the votes. The vote of a neighbour is ``exp(similarity / temperature)``.
        stage: ``'val'``, or ``'test'`` in a ``test_cfg``. Determines which hooks the loop calls.
        keep: File to which the features of both sets are saved.

    Example:
        val_cfg = dict(type='KNNLoop', bank=dict(batch_size=256, dataset=..., sampler=dict(type='DefaultSampler',
                       shuffle=False), collate_fn=dict(type='default_collate')))
    """

    def __init__(
        self,
        runner: Runner,
        dataloader: Any,
        evaluator: Any,
        bank: dict,
        ks: Sequence[int] = (10, 20, 100, 200),
        temperature: float = 0.07,
        stage: str = 'val',
        keep: str | None = None,
        fp16: bool = False,
    ) -> None:
        super().__init__(runner, dataloader, evaluator, fp16)
        self.bank = runner.build_dataloader(bank, seed=runner.seed)
        self.ks = ks
        self.temperature = temperature
        self.stage = stage
        self.keep = keep
        self.queries: list[Features] = []

    def run(self) -> dict[str, float]:
        self.call(f'before_{self.stage}')
        self.call(f'before_{self.stage}_epoch')
        self.runner.model.eval()
        self.queries = []
        for number, batch in enumerate(self.dataloader):
            self.run_iter(number, batch)
        queries = joined(self.queries, len(self.dataloader.dataset))
        with autocast(enabled=self.fp16):
            images = extract(self.model, self.bank)
        if self.keep and is_main_process():
            sets = dict(images=images, queries=queries)
            state = {f'{name}.{part}': x.cpu() for name, each in sets.items() for part, x in each._asdict().items()}
            checkpoints.write(self.keep, state)
        metrics: dict[str, float] = {}
        for k, (top1, top5) in accuracy(queries, images, self.ks, self.temperature).items():
            metrics |= {f'accuracy/{k}-NN': top1, f'accuracy/{k}-NN_top5': top5}
        self.call(f'after_{self.stage}_epoch', metrics=metrics)
        self.call(f'after_{self.stage}')
        return metrics

    @torch.no_grad()
    def run_iter(self, idx: int, data_batch: dict) -> None:
        self.call(f'before_{self.stage}_iter', batch_idx=idx, data_batch=data_batch)
        with autocast(enabled=self.fp16):
            self.queries.append(features_of(self.model, data_batch))
        self.call(f'after_{self.stage}_iter', batch_idx=idx, data_batch=data_batch, outputs=[])

    def call(self, hook: str, **arguments: Any) -> None:
        self.runner.call_hook(hook, **arguments)

    @property
    def model(self) -> Any:
        model = self.runner.model
        return model.module if is_model_wrapper(model) else model
