"""The base class of all backbones, which loads pretrained weights, freezes stages and fuses norms."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from mmengine.logging import MMLogger, print_log
from mmengine.model import BaseModule, PretrainedInit
from mmengine.registry import WEIGHT_INITIALIZERS
from timm.layers import trunc_normal_
from timm.models.levit import ConvNorm, LinearNorm
from torch import Tensor, nn

from mmdtn import checkpoints
from mmdtn.errors import nearest
from mmdtn.norms import BatchStatisticsNorm, TokenNorm, needs_grid, start_new_task
from mmdtn.norms.base import TORCHS_BATCH_AND_INSTANCE_NORMS
from mmdtn.registry import class_of

from .folding import FusesNorms, neighbours, replace, without_batch_norm

OPTIONS = ('source', 'warm_start', 'resize', 'keep')  # options of init_cfg that mmengine's PretrainedInit lacks


class Backbone(BaseModule):
    """Base class of backbones that initialises weights, freezes stages and fuses norms.

    ``last_norm`` is the name of the final norm if the output depends only on this norm's tokens, on one of them, or on
    their mean.
    """

    last_norm: str | None = None

    def __init__(self, frozen_stages: int, norm_eval: bool, init_cfg: dict | None) -> None:
        super().__init__(init_cfg)
        self.frozen_stages = frozen_stages
        self.norm_eval = norm_eval

    def check_checkpointing(self) -> None:
        """Raises an error if a norm does not support ``with_cp``.

        Checkpointing runs each block twice per iteration. If the results of a norm differ between the two runs,
        gradients are wrong.
        """
        for name, module in self.named_modules():
            if isinstance(module, TokenNorm) and not module.repeatable:
                raise ValueError(
                    f'with_cp=True runs each block twice per iteration, but {name}, {type(module).__name__}, computes '
                    'different results in the two runs, so gradients would be wrong. Remove with_cp, or choose another '
                    'norm_cfg.'
                )

    def fusible_norms(self) -> list[str]:
        """Returns the names of all norms that a neighbouring layer can absorb. Batch norms of timm come first."""
        layers = [f'{name}.bn' for name, part in self.named_modules() if isinstance(part, (ConvNorm, LinearNorm))]
        return layers + [f'{name}.{norm}' for name, m in self.named_modules() for norm in neighbours(m)]

    def fuse_norm(self, name: str) -> str:
        """Fuses a norm of ``fusible_norms`` into its neighbouring layer, and returns the layer's name.

        Raises ``NotExact`` if the outputs would change.
        """
        parent, _, child = name.rpartition('.')
        module = self.get_submodule(parent)
        if isinstance(module, (ConvNorm, LinearNorm)):
            replace(self, parent, without_batch_norm(module))
            return parent
        assert isinstance(module, FusesNorms)
        module.fuse_norm(child)
        return f'{parent}.{module.neighbours()[child].name}'

    def make_room(self, fused: Sequence[str]) -> None:
        """Prepares the model for a checkpoint with fused norms.

        Replaces the fused norms by ``nn.Identity``, and adds to their neighbours the parameters that a fusion adds.
        """
        fusible = self.fusible_norms()
        if unknown := {*fused} - {*fusible, self.last_norm}:
            raise ValueError(
                f'fused has {sorted(unknown)}, but {type(self).__name__} has no such norm that can be fused. Examples '
                f'of its norms are {", ".join(fusible[:3])}.'
            )
        for name in fused:
            if not name.endswith('.bn'):
                replace(self, name, nn.Identity())
        for name in fusible:
            if name in fused or isinstance(self.get_submodule(name), nn.Identity):
                self.fuse_norm(name)

    def frozen_parts(self) -> Iterable[nn.Module | Tensor]:
        """Returns the modules and parameters that ``frozen_stages`` freezes.

        0 freezes the first patch embedding, and n > 0 also freezes the first n stages.
        """
        raise NotImplementedError

    def init_weights(self) -> None:
        """Initialises the weights or loads them from a checkpoint.

        Without ``init_cfg``, a truncated normal distribution initialises linear layers and embeddings, and DTN layers
        keep their initial values. ``init_cfg=dict(type='Pretrained', checkpoint=PATH_OR_URL)`` loads any file that
        :mod:`mmdtn.checkpoints` supports, and accepts the options ``source``, ``warm_start`` and ``resize``.
        """
        if self.init_cfg is None:
            self.apply(_init)
            for name, parameter in self.named_parameters():
                if name.rpartition('.')[2] in ('pos_embed', 'cls_token', 'cls_pos'):
                    trunc_normal_(parameter, std=0.02)
            return
        if not isinstance(self.init_cfg, dict) or class_of(self.init_cfg, WEIGHT_INITIALIZERS) is not PretrainedInit:
            super().init_weights()
            return
        options = dict(self.init_cfg)
        source, prefix = options.pop('checkpoint'), options.pop('prefix', '')
        options.pop('type')
        checkpoint = checkpoints.load(source)
        state = checkpoints.state_of(checkpoint, source)
        found = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
        if not found:
            raise checkpoints.UnfitFile(
                f'No key of {source} starts with {prefix!r}. Its first keys are {", ".join(list(state)[:3])}. '
                'Remove prefix from init_cfg to detect it automatically.'
            )
        if strange := options.keys() - set(OPTIONS):
            name = strange.pop()
            raise checkpoints.UnfitFile(f'init_cfg has no option {name!r}{nearest(name, OPTIONS)}')
        try:
            settings = checkpoints.backbone_settings(checkpoint)
            if told := checkpoints.settings_by_arguments(checkpoint):
                options.setdefault('source', told[0])
            ours, report = checkpoints.translate(found, self, **options, settings=settings)
        except ValueError as error:
            raise checkpoints.UnfitFile(f'{source} does not fit {type(self).__name__}: {error}') from None
        self.load_state_dict(ours, strict=False)
        start_new_task(self)
        print_log(f'{type(self).__name__} from {source}: {report}', logger=MMLogger.get_current_instance())

    def train(self, mode: bool = True) -> 'Backbone':
        super().train(mode)
        if self.frozen_stages >= 0:
            for part in self.frozen_parts():
                part.requires_grad_(False)
                if isinstance(part, nn.Module):
                    part.eval()
        if mode and self.norm_eval:
            for module in self.modules():
                if isinstance(module, (TORCHS_BATCH_AND_INSTANCE_NORMS, BatchStatisticsNorm)):
                    module.eval()
        return self


def architecture(arch: str | dict, archs: dict[str, dict[str, Any]], optional: tuple[str, ...] = ()) -> dict[str, Any]:
    """Returns the fields of an architecture.

    ``arch`` is a name in ``archs`` or a dict of all fields. A dict with a name under ``'base'`` needs only the fields
    that differ from that architecture. All ``optional`` fields and all fields that are tuples in ``archs`` have one
    value per stage.
    """
    said = dict(arch) if isinstance(arch, dict) else dict(base=arch)
    base = said.pop('base', None)
    example = next(iter(archs.values()))
    fields = list(example)
    if base is not None:
        if base not in archs:
            raise ValueError(
                f'There is no arch={base!r}. Choose one of {list(archs)}, or give a dict of {fields}'
                f'{nearest(base, archs)}'
            )
        said = archs[base] | said
    may = f', and may have {", ".join(optional)}' if optional else ''
    if missing := set(fields) - said.keys():
        raise ValueError(f'arch lacks {sorted(missing)}. It needs {fields}{may}.')
    if unknown := said.keys() - {*fields, *optional}:
        raise ValueError(f'arch has unknown fields {sorted(unknown)}. It needs {fields}{may}.')
    by_stage = {name: len(value) for name, value in example.items() if isinstance(value, tuple)}
    for name in said:
        if (name in by_stage or name in optional) and len(said[name]) != (stages := max(by_stage.values())):
            raise ValueError(f'arch has {name}={said[name]}, but it needs one value for each of the {stages} stages.')
    return said


def check_other_norms(cfg: dict[str, Any]) -> dict[str, Any]:
    """Returns ``other_norm_cfg`` unchanged, or raises an error if its norm works only inside the blocks."""
    if needs_grid(cfg):
        raise ValueError(
            f'other_norm_cfg has type={cfg["type"]!r}, but DTN can be used only inside the blocks, by norm_cfg. Choose '
            "'LN', 'BN' or another normaliser that needs no token grid for other_norm_cfg."
        )
    return cfg


@torch.no_grad()
def _init(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, mode='fan_out')
        if module.bias is not None:
            nn.init.zeros_(module.bias)
