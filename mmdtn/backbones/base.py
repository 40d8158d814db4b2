"""What every backbone does: loading pretrained weights and freezing, as MMDetection's backbones do."""

from collections.abc import Iterable
from typing import Any

import torch
from mmengine.logging import MMLogger, print_log
from mmengine.model import BaseModule
from timm.layers import trunc_normal_
from torch import Tensor, nn

from mmdtn.norms import BatchStatisticsNorm, MovingAverageNorm, TokenNorm

from .. import checkpoints


class Backbone(BaseModule):
    """Start, pretrained weights and freezing; a subclass says what its stages are."""

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
        if self.init_cfg.get('type') != 'Pretrained':
            super().init_weights()
            return
        options = dict(self.init_cfg)
        source, prefix = options.pop('checkpoint'), options.pop('prefix', '')
        options.pop('type')
        state = checkpoints.read(source)
        found = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
        if not found:
            raise ValueError(
                f'No key of {source} starts with {prefix!r}; its keys are like: {", ".join(list(state)[:3])}. '
                'Leave prefix out of init_cfg to have it found.'
            )
        try:
            ours, report = checkpoints.convert(found, self, **options)
        except ValueError as error:
            raise ValueError(f'{source} cannot fill {type(self).__name__}: {error}') from None
        self.load_state_dict(ours, strict=False)
        for module in self.modules():
            if isinstance(module, MovingAverageNorm):
                module.start_new_task()
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
                if isinstance(module, (nn.modules.batchnorm._NormBase, BatchStatisticsNorm)):
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
            raise ValueError(f'arch={base!r}: choose one of {list(archs)}, or a dict of {fields}.')
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
