"""Dynamic Vision Transformer, a cascade of classifiers on increasingly fine grids, with early exit."""

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
    """Dynamic Vision Transformer (arXiv 2105.15075), a cascade of K complete classifiers, which are called exits.

    An image leaves at the first exit whose largest probability reaches the exit's threshold, or else at the last exit.
    Later exits split the image into more tokens, and reuse the previous exit's tokens and attention logits.

    Args:
        arch: ``'t2t-12' | 't2t-14' | 'deit-s'``, or a dict with the fields of ``ARCHS``. A dict with one of these names
            under ``'base'`` needs only the fields that differ.
        num_classes: Number of classes.
        grids: For each exit, the number of tokens along a side of an image of ``img_size``. Each number is one to two
        times the previous one. The soft splits of T2T-ViT give 7, 10 and 14 tokens along 224 px, and
            patches give any number.
        reuse_features: Whether each block concatenates its tokens with 48 channels, which are computed from the last
            tokens of the previous exit.
        reuse_relations: Whether a function of all attention logits of the previous exit is added to the logits of each
            block.
        norm_cfg: Normaliser of the first ``dtn_layers`` blocks of each exit. The published model has
            ``dict(type='LN')``. DTN uses the statistics of LayerNorm for the class token, which has no position on the
            grid.
        dtn_layers: Number of blocks of each exit that use ``norm_cfg``. By default, all blocks do. drop_path_rate:
        Stochastic depth rate of the last block of each exit. img_size: Image side for which position embeddings are
        made. Other image sizes lead to different grids. loss: Config of the loss, which takes the logits of one exit,
        and labels or scores. The default is
            cross-entropy.
        loss_weights: Weight of the loss of each exit. The default is 1 for all.
        thresholds: Probabilities at which images leave in prediction, for all exits or for all but the last.
            ``dict(file='budget.json', gflops=1.0)`` reads thresholds that need at most this many GFLOPs on average from
            a file of ``tools/dvt_budget.py``. By default, all exits process every image, and the last one makes the
            prediction.
        train_cfg: ``augments`` holds batch augmentations, as in ``ImageClassifier``. ``frozen`` lists parts of an exit
        that are not trained, such as ``['norm', 'cls_token']``. data_preprocessor: Config of the data preprocessor. The
        default type is MMPretrain's ``ClsDataPreprocessor``. init_cfg: ``dict(type='Pretrained', checkpoint=...)``
        loads a checkpoint of this package or of DVT's authors.
            With ``heads=False``, the linear heads are not loaded.

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
        norm_cfg: dict = dict(type='LN'),  # noqa: B006  # MM's convention; never modified
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
        """Runs the model in mode ``'tensor'``, ``'predict'`` or ``'loss'``, like ``ImageClassifier``.

        Mode ``'tensor'`` returns a tuple with the logits ``B x num_classes`` of all exits or of the first ``exits``.
        """
        if mode == 'tensor':
            return self.logits(inputs, exits)
        if mode == 'predict':
            return self.predict(inputs, data_samples)
        if mode == 'loss' and data_samples is not None:
            return self.loss(inputs, data_samples)
        raise ValueError(f"mode={mode!r}: choose 'tensor' or 'predict', or 'loss' with data_samples.")

    def logits(self, images: Tensor, exits: int | None = None) -> tuple[Tensor, ...]:
        """Returns the logits of all exits or of the first ``exits``."""
        run = self.exits[:exits]
        upstream, out = None, []
        for i in range(len(run)):
            logits, upstream = self.run_exit(i, images, upstream, last=i + 1 == len(run))
            out.append(logits)
        return tuple(out)

    def run_exit(
        self, number: int, images: Tensor, upstream: Upstream | None, last: bool = False
    ) -> tuple[Tensor, Upstream]:
        """Runs one exit, given images and the previous exit's output.

        Args:
            number: Index of the exit, counted from 0.
            images: Images ``B x 3 x H x W``.
            upstream: Output of the previous exit, or None for the first exit.
            last: Whether no further exit runs, so that attention logits are not returned.
        """
        following = None if last else next(iter(self.exits[number + 1 : number + 2]), None)
        hand_on_relations = following is not None and following.relations is not None
        return self.exits[number](images, upstream, hand_on_relations)

    def loss(self, inputs: Tensor, data_samples: list) -> dict[str, Tensor]:
        """Returns each exit's weighted loss as ``exit1_loss`` and so on. MMEngine adds the losses."""
        if 'gt_score' in data_samples[0]:  # scores of mixed images
            target = torch.stack([sample.gt_score for sample in data_samples])
        else:
            target = torch.cat([sample.gt_label for sample in data_samples])
        losses = zip(self.loss_weights, self.logits(inputs), strict=True)
        return {f'exit{i}_loss': w * self.loss_module(logits, target) for i, (w, logits) in enumerate(losses, 1)}

    def predict(self, inputs: Tensor, data_samples: list | None = None) -> list:
        """Returns data samples with ``pred_score``, ``pred_label`` and ``exit``, the exit's number counted from 1.

        Without thresholds, ``exit_conf`` and ``exit_label`` hold each exit's largest probability and predicted class.
        """
        if data_samples is None:
            from mmpretrain.structures import DataSample  # not needed to compute logits

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
        """Returns the probabilities ``B x num_classes``, and the number of each image's exit, counted from 1.

        Later exits do not process images that have left.
        """
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
        """Initialises the weights, and then loads the checkpoint of ``init_cfg`` if it has one.

        A truncated normal distribution initialises linear weights, class tokens and learned positions. Other parameters
        keep torch's initialisation. With ``heads=False``, the heads are not loaded.
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
    """Converts the argument ``thresholds`` to one value for each exit except the last, where all images leave."""
    if said is None:
        return None
    values = read_thresholds(**said) if isinstance(said, dict) else list(said)
    if len(values) not in (exits - 1, exits):
        raise ValueError(f'thresholds={values}: {exits} exits need {exits - 1}, as the last takes every image.')
    return tuple(float(value) for value in values[: exits - 1])


def _with_augments(data_preprocessor: dict | None, train_cfg: dict) -> dict | None:
    if data_preprocessor is None and 'augments' not in train_cfg:
        return None  # logits do not need MMPretrain
    said = dict(data_preprocessor or {})
    said.setdefault('type', 'mmpretrain.ClsDataPreprocessor')
    if 'augments' in train_cfg:
        said.setdefault('batch_augments', dict(augments=train_cfg['augments'], probs=train_cfg.get('probs')))
    return said


def _check(arch: dict, grids: Sequence[int], dtn_layers: int | None, loss_weights: Sequence[float] | None) -> None:
    if arch['family'] not in FAMILIES:
        raise ValueError(f'arch: family={arch["family"]!r} is not one of {list(FAMILIES)}.')
    if not grids or any(not coarse <= fine <= 2 * coarse for coarse, fine in itertools.pairwise(grids)):
        raise ValueError(f'grids={tuple(grids)}: each number has to be between one and two times the previous one.')
    if dtn_layers is not None and not 0 <= dtn_layers <= arch['depth']:
        raise ValueError(f'dtn_layers={dtn_layers} is not between 0 and the {arch["depth"]} blocks of an exit.')
    if loss_weights is not None and len(loss_weights) != len(grids):
        raise ValueError(f'loss_weights={list(loss_weights)}: give one for each of the {len(grids)} exits.')
