"""What every backbone does: loading pretrained weights and freezing, as MMDetection's backbones do."""

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

OPTIONS = ('source', 'warm_start', 'resize', 'keep')  # of init_cfg, beside those of mmengine's PretrainedInit


class Backbone(BaseModule):
    """Start, pretrained weights, freezing, and what fusing left; a subclass says what its stages are.

    ``last_norm`` names the norm whose output is all that comes out, as tokens, as one of them, or as their mean.
    """

    last_norm: str | None = None

    def __init__(self, frozen_stages: int, norm_eval: bool, init_cfg: dict | None) -> None:
        super().__init__(init_cfg)
        self.frozen_stages = frozen_stages
        self.norm_eval = norm_eval

    def check_checkpointing(self) -> None:
        """``with_cp`` runs blocks twice a step: a norm that then computes another function has wrong gradients."""
        for name, module in self.named_modules():
            if isinstance(module, TokenNorm) and not module.repeatable:
                raise ValueError(
                    f'with_cp=True computes each block twice a step, but {name}, {type(module).__name__}, changes with '
                    'each time, so that gradients would be wrong. Leave with_cp out, or choose another norm_cfg.'
                )

    def fusible_norms(self) -> list[str]:
        """The names of all norms beside which there is a layer to take them in; batch norms of timm's layers first."""
        layers = [f'{name}.bn' for name, part in self.named_modules() if isinstance(part, (ConvNorm, LinearNorm))]
        return layers + [f'{name}.{norm}' for name, m in self.named_modules() for norm in neighbours(m)]

    def fuse_norm(self, name: str) -> str:
        """The name of the layer that has taken in a norm of ``fusible_norms``; raises ``NotExact`` where none can."""
        parent, _, child = name.rpartition('.')
        module = self.get_submodule(parent)
        if isinstance(module, (ConvNorm, LinearNorm)):
            replace(self, parent, without_batch_norm(module))
            return parent
        assert isinstance(module, FusesNorms)
        module.fuse_norm(child)
        return f'{parent}.{module.neighbours()[child].name}'

    def make_room(self, fused: Sequence[str]) -> None:
        """Takes out the norms that were fused, and gives their neighbours the parameters that these then have."""
        fusible = self.fusible_norms()
        if unknown := {*fused} - {*fusible, self.last_norm}:
            raise ValueError(
                f'fused names {sorted(unknown)}, where {type(self).__name__} has no norm that can be fused; it has '
                f'{", ".join(fusible[:3])} and so on.'
            )
        for name in fused:
            if not name.endswith('.bn'):
                replace(self, name, nn.Identity())
        for name in fusible:
            if name in fused or isinstance(self.get_submodule(name), nn.Identity):
                self.fuse_norm(name)

    def frozen_parts(self) -> Iterable[nn.Module | Tensor]:
        """What ``frozen_stages`` holds still: 0 the first patch embedding, n also the first n stages."""
        raise NotImplementedError

    def init_weights(self) -> None:
        """Linear layers and embeddings from a truncated normal, or the pretrained file; DTN keeps its own start.

        ``dict(type='Pretrained', checkpoint=PATH_OR_URL)`` takes any file that :mod:`mmdtn.checkpoints` knows, and its
        options ``source``, ``warm_start`` and ``resize``.
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
                f'No key of {source} starts with {prefix!r}; its keys are like: {", ".join(list(state)[:3])}. '
                'Leave prefix out of init_cfg to have it found.'
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
            raise checkpoints.UnfitFile(f'{source} cannot fill {type(self).__name__}: {error}') from None
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
    """The fields of an architecture: a name in ``archs``, all fields, or under ``'base'`` a name and what differs.

    A field that is a tuple in ``archs``, and each of ``optional``, has a value for each stage.
    """
    said = dict(arch) if isinstance(arch, dict) else dict(base=arch)
    base = said.pop('base', None)
    example = next(iter(archs.values()))
    fields = list(example)
    if base is not None:
        if base not in archs:
            raise ValueError(f'arch={base!r}: choose one of {list(archs)}, or a dict of {fields}{nearest(base, archs)}')
        said = archs[base] | said
    may = f', and may have {", ".join(optional)}' if optional else ''
    if missing := set(fields) - said.keys():
        raise ValueError(f'arch lacks {sorted(missing)}; it needs {fields}{may}.')
    if unknown := said.keys() - {*fields, *optional}:
        raise ValueError(f'arch has unknown fields {sorted(unknown)}; it needs {fields}{may}.')
    by_stage = {name: len(value) for name, value in example.items() if isinstance(value, tuple)}
    for name in said:
        if (name in by_stage or name in optional) and len(said[name]) != (stages := max(by_stage.values())):
            raise ValueError(f'arch: {name}={said[name]} should have a value for each of the {stages} stages.')
    return said


def check_other_norms(cfg: dict[str, Any]) -> dict[str, Any]:
    """``other_norm_cfg`` of a backbone as it is, if it can stand outside the blocks that ``norm_cfg`` reaches."""
    if needs_grid(cfg):
        raise ValueError(
            f'other_norm_cfg has type={cfg["type"]!r}, but DTN belongs in the blocks, which norm_cfg is for. Choose '
            "'LN', 'BN' or another normaliser that needs no grid for embeddings, reductions and ends."
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
