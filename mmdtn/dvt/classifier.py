"""Dynamic Vision Transformer: classifiers of one architecture on finer and finer grids, of which an image needs few."""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from mmengine.logging import MMLogger, print_log
from mmengine.model import BaseModel
from mmengine.registry import MODELS
from timm.layers import trunc_normal_
from torch import Tensor, nn

from mmdtn import checkpoints
from mmdtn.backbones.base import architecture
from mmdtn.norms import start_new_task

from .budget import read_thresholds
from .exits import ARCHS, FAMILIES, Exit, Reuse
from .reuse import Upstream


@MODELS.register_module()
class DVT(BaseModel):
    """Dynamic Vision Transformer (arXiv 2105.15075): K complete classifiers, run one after another.

    An image leaves at the first exit whose largest probability reaches that exit's threshold, and at the last one
    otherwise. Later exits cut the image into more tokens, and reuse tokens and attention logits of the exit before.

    Args:
        arch: ``'t2t-12' | 't2t-14' | 'deit-s'``, or a dict of the fields of ``ARCHS``; with a name under ``'base'``,
            only of those that differ from it.
        num_classes: Classes.
        grids: Tokens along a side of an image of ``img_size`` at each exit: from one exit to the next as many or more,
            up to twice as many. Soft splits of T2T-ViT give 7, 10 and 14 tokens along 224 px, patches any number.
        reuse_features: Each block joins to its tokens 48 channels made of the last tokens of the exit before.
        reuse_relations: Each block adds to its attention logits what is made of all those of the exit before.
        norm_cfg: Normaliser of the first ``dtn_layers`` blocks of each exit: ``dict(type='LN')`` is the published
            model. A class token has no place on the grid: DTN gives it LayerNorm's statistics.
        dtn_layers: How many blocks of each exit take ``norm_cfg``; None: all.
        drop_path_rate: Stochastic depth of the last block of each exit.
        img_size: Side of the images for which positions are held. Images of other sizes get other grids.
        loss: Of one exit's logits and labels, or scores of classes. None: cross-entropy.
        loss_weights: For each exit, what its loss counts; None: 1.
        thresholds: For each exit, or each but the last: the probability at which an image leaves, in prediction.
            ``dict(file='budget.json', gflops=1.0)`` takes those that ``tools/dvt_budget.py`` found to need that many
            GFLOPs in the mean. None: every exit answers for every image, and the last one's answer counts.
        train_cfg: ``augments``: batch augmentations, as ``ImageClassifier`` takes them. ``frozen``: a list of names of
            parts that are not trained, as they are called within an exit: ``['norm', 'cls_token']``.
        data_preprocessor: MMPretrain's ``ClsDataPreprocessor`` unless it names another type.
        init_cfg: ``dict(type='Pretrained', checkpoint=...)`` loads a file of this package or of DVT's authors; with
            ``heads=False`` all of it but the linear heads.

    Example:
        >>> model = DVT(dict(base='deit-s', width=48, depth=2, num_heads=3), 10, grids=(4, 8), img_size=32)
        >>> [tuple(logits.shape) for logits in model(torch.randn(2, 3, 32, 32))]
        [(2, 10), (2, 10)]
    """

    def __init__(
        self,
        arch: str | dict = 't2t-12',
        num_classes: int = 1000,
        grids: Sequence[int] = (7, 10, 14),
        reuse_features: bool = True,
        reuse_relations: bool = True,
        norm_cfg: dict = dict(type='LN'),  # noqa: B006  # MM's convention; never written to
        dtn_layers: int | None = None,
        drop_path_rate: float = 0.1,
        img_size: int = 224,
        loss: dict | None = None,
        loss_weights: Sequence[float] | None = None,
        thresholds: Sequence[float] | dict | None = None,
        train_cfg: dict | None = None,
        data_preprocessor: dict | None = None,
        init_cfg: dict | None = None,
    ) -> None:
        train_cfg = train_cfg or {}
        super().__init__(_with_augments(data_preprocessor, train_cfg), init_cfg)
        a = architecture(arch, ARCHS)
        _check(a, grids, dtn_layers, loss_weights)
        own = a['depth'] if dtn_layers is None else dtn_layers
        norm_cfgs = [norm_cfg] * own + [dict(type='LN')] * (a['depth'] - own)
        self.num_classes = num_classes
        self.exits = nn.ModuleList(
            Exit(
                a,
                num_classes,
                grid,
                img_size,
                norm_cfgs,
                drop_path_rate,
                Reuse(reuse_features, reuse_relations) if i else Reuse(),
            )
            for i, grid in enumerate(grids)
        )
        self.loss_module = nn.CrossEntropyLoss() if loss is None else MODELS.build(loss)
        self.loss_weights = [1.0] * len(grids) if loss_weights is None else list(loss_weights)
        self.thresholds = thresholds_of(thresholds, len(grids))
        self._freeze(train_cfg.get('frozen', []))

    def forward(
        self,
        inputs: Tensor,
        data_samples: list | None = None,
        mode: str = 'tensor',
        exits: int | None = None,
    ) -> Any:
        """As ``ImageClassifier``: ``mode`` is ``'tensor'``, ``'predict'`` or ``'loss'``.

        ``'tensor'`` gives a tuple of the logits ``B x num_classes`` of each exit, or of the first ``exits``.
        """
        if mode == 'tensor':
            return self.logits(inputs, exits)
        if mode == 'predict':
            return self.predict(inputs, data_samples)
        if mode == 'loss' and data_samples is not None:
            return self.loss(inputs, data_samples)
        raise ValueError(f"mode={mode!r}: choose 'tensor', 'predict', or with data_samples 'loss'.")

    def logits(self, images: Tensor, exits: int | None = None) -> tuple[Tensor, ...]:
        """Of the first ``exits`` exits, or of all."""
        run = self.exits[:exits]
        upstream, out = None, []
        for i in range(len(run)):
            logits, upstream = self.run_exit(i, images, upstream, last=i + 1 == len(run))
            out.append(logits)
        return tuple(out)

    def run_exit(
        self, number: int, images: Tensor, upstream: Upstream | None, last: bool = False
    ) -> tuple[Tensor, Upstream]:
        """Exit ``number``, from 0, on images and what the exit before handed on; ``last`` need not hand on all."""
        following = None if last else next(iter(self.exits[number + 1 : number + 2]), None)
        hand_on_relations = following is not None and following.relations is not None
        return self.exits[number](images, upstream, hand_on_relations)

    def loss(self, inputs: Tensor, data_samples: list) -> dict[str, Tensor]:
        """``exit1_loss`` and so on, which mmengine sums."""
        if 'gt_score' in data_samples[0]:  # of mixed images
            target = torch.stack([sample.gt_score for sample in data_samples])
        else:
            target = torch.cat([sample.gt_label for sample in data_samples])
        losses = zip(self.loss_weights, self.logits(inputs), strict=True)
        return {f'exit{i}_loss': w * self.loss_module(logits, target) for i, (w, logits) in enumerate(losses, 1)}

    def predict(self, inputs: Tensor, data_samples: list | None = None) -> list:
        """Data samples with ``pred_score``, ``pred_label`` and ``exit``, from 1: the one that answered.

        Without thresholds also ``exit_conf`` and ``exit_label``: each exit's largest probability, and its class.
        """
        if data_samples is None:
            from mmpretrain.structures import DataSample  # which users of logits alone need not have

            data_samples = [DataSample() for _ in inputs]
        if self.thresholds is None:
            scores = torch.stack([logits.float().softmax(-1) for logits in self.logits(inputs)], 1)
            for sample, of_exits in zip(data_samples, scores, strict=True):
                conf, label = of_exits.max(-1)
                sample.set_pred_score(of_exits[-1]).set_pred_label(label[-1:])
                sample.exit_conf, sample.exit_label, sample.exit = conf, label, len(self.exits)
            return data_samples
        for sample, score, number in zip(data_samples, *self.leave_early(inputs), strict=True):
            sample.set_pred_score(score).set_pred_label(score.argmax(0, keepdim=True))
            sample.exit = int(number)
        return data_samples

    def leave_early(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Probabilities ``B x num_classes`` and number of the exit, from 1, each image run no further than that."""
        assert self.thresholds is not None
        scores = images.new_empty(len(images), self.num_classes, dtype=torch.float32)
        numbers = torch.empty(len(images), dtype=torch.long, device=images.device)
        left = torch.arange(len(images), device=images.device)
        upstream = None
        for i, threshold in enumerate((*self.thresholds, -torch.inf)):
            logits, upstream = self.run_exit(i, images, upstream)
            score = logits.float().softmax(-1)
            sure = score.amax(-1) >= threshold
            scores[left[sure]], numbers[left[sure]] = score[sure], i + 1
            stay = (~sure).nonzero()[:, 0]
            if not len(stay):
                break
            images, left, upstream = images[stay], left[stay], upstream.of(stay)
        return scores, numbers

    def init_weights(self) -> None:
        """Linear weights, class tokens and learned positions from a truncated normal, the rest as torch.

        A pretrained file takes the place of what it has: with ``heads=False`` of all but the heads.
        """
        for name, parameter in self.named_parameters():
            if name.endswith(('.cls_token', '.pos_embed')):
                trunc_normal_(parameter, std=0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        if self.init_cfg is None:
            return
        if self.init_cfg.get('type') != 'Pretrained':
            super().init_weights()
            return
        options = dict(self.init_cfg)
        del options['type']
        source, heads = options.pop('checkpoint'), options.pop('heads', True)
        state, keep = checkpoints.read(source), None if heads else r'exits\.\d+\.head\..+'
        try:
            ours, report = checkpoints.translate(state, self, keep=keep, **options)
        except ValueError as error:
            raise checkpoints.UnfitFile(f'{source} cannot fill DVT: {error}') from None
        self.load_state_dict(ours, strict=False)
        start_new_task(self)
        print_log(f'DVT from {source}: {report}', logger=MMLogger.get_current_instance())

    def _freeze(self, parts: Sequence[str]) -> None:
        of_exits = [(name.split('.', 2)[2], p) for name, p in self.named_parameters()]
        for part in parts:
            found = [p for name, p in of_exits if f'{name}.'.startswith(f'{part}.')]
            if not found:
                raise ValueError(f'train_cfg: frozen={list(parts)}, but an exit has no {part!r}.')
            for parameter in found:
                parameter.requires_grad_(False)


def thresholds_of(said: Sequence[float] | dict | None, exits: int) -> tuple[float, ...] | None:
    """One for each exit but the last, at which every image leaves."""
    if said is None:
        return None
    values = read_thresholds(**said) if isinstance(said, dict) else list(said)
    if len(values) not in (exits - 1, exits):
        raise ValueError(f'thresholds={values}: {exits} exits need {exits - 1}, the last one takes every image.')
    return tuple(float(value) for value in values[: exits - 1])


def _with_augments(data_preprocessor: dict | None, train_cfg: dict) -> dict | None:
    if data_preprocessor is None and 'augments' not in train_cfg:
        return None  # a model for logits, which works without MMPretrain
    said = dict(data_preprocessor or {})
    said.setdefault('type', 'mmpretrain.ClsDataPreprocessor')
    if 'augments' in train_cfg:
        said.setdefault('batch_augments', dict(augments=train_cfg['augments'], probs=train_cfg.get('probs')))
    return said


def _check(arch: dict, grids: Sequence[int], dtn_layers: int | None, loss_weights: Sequence[float] | None) -> None:
    if arch['family'] not in FAMILIES:
        raise ValueError(f'arch: family={arch["family"]!r} is none of {list(FAMILIES)}.')
    if not grids or any(not coarse <= fine <= 2 * coarse for coarse, fine in itertools.pairwise(grids)):
        raise ValueError(f'grids={tuple(grids)}: each has to be as fine as the one before, up to twice as fine.')
    if dtn_layers is not None and not 0 <= dtn_layers <= arch['depth']:
        raise ValueError(f'dtn_layers={dtn_layers} is not within the {arch["depth"]} blocks of an exit.')
    if loss_weights is not None and len(loss_weights) != len(grids):
        raise ValueError(f'loss_weights={list(loss_weights)}: there are {len(grids)} exits.')
