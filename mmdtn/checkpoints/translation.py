"""Translates published checkpoints to models of this package.

Every tensor of the checkpoint is either used or listed in the report. A checkpoint that does not fit the model causes
an error.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import resample_abs_pos_embed_nhwc, resize_rel_pos_bias_table
from torch import Tensor, nn

from mmdtn.norms import DTN, norm_class
from mmdtn.norms.dtn import mix_of

from .format import State
from .formats import FORMATS, recognise
from .origin import check_origin, in_one_line

# Parameters at the end of a backbone that may differ between classification and detection. All other parameters must
# fit.
ENDS = r'cls_token|cls_pos|norm[0-3]?\.(weight|bias)'
# Names of the last layer in MMPretrain's LinearClsHead and VisionTransformerClsHead. Other packages call it ``head``.
LAST_LAYERS = ('head.fc.', 'head.layers.head.')
DTN_PARAMETERS = ('mean_mix', 'var_mix', 'position')


@dataclass
class TranslationReport:
    """Lists what happened to the tensors of a file and to the parameters of a model.

    Args:
        format: Format of the file.
        used: Number of tensors that were loaded.
        dropped: Keys of the file that were not loaded, each with the reason.
        filled: Parameters that were resized or set to start values, each with the reason.
        kept: Parameters that keep their initial values.
        note: Message about settings that the tensors of the file do not determine.
    """

    format: str
    used: int = 0
    dropped: dict[str, str] = field(default_factory=dict)
    filled: dict[str, str] = field(default_factory=dict)
    kept: list[str] = field(default_factory=list)
    note: str = ''

    def __str__(self) -> str:
        lines = [f'{self.format}: {self.used} tensors from the file']
        lines += [f'  dropped {key}: {why}' for key, why in self.dropped.items()]
        for why in dict.fromkeys(self.filled.values()):
            keys = [key for key in self.filled if self.filled[key] == why]
            lines.append(f'  {why}: {keys[0]}' + (f' and {len(keys) - 1} more' if keys[1:] else ''))
        lines += [f'  {key}: not loaded, keeps its initial value' for key in self.kept]
        lines += [f'  {self.note}'] if self.note else []
        return '\n'.join(lines)


def translate(
    state: State,
    model: nn.Module,
    source: str = 'auto',
    warm_start: float | None = None,
    resize: bool = False,
    keep: str | None = None,
    settings: Mapping[str, Any] | None = None,
) -> tuple[State, TranslationReport]:
    """Translates a state dict so that ``model`` can load it.

    Args:
        state: State dict that :func:`read` returned.
        model: Backbone of this package, or a classifier or detector with such a backbone. Parameters that the file
            lacks are taken from the model, so the model must be newly initialised.
        source: Format of the file, one of ``CHOICES``.
        warm_start: Initial value of all lambdas if the file has LayerNorm and the model has DTN.
        resize: Whether to interpolate position embeddings and bias tables of a different size. If False, they raise an
            error.
        keep: Regular expression for names of backbone parameters that keep their initial values.
        settings: Settings of the backbone in the file, as :func:`backbone_settings` returns them.
    """
    whole = hasattr(model, 'backbone')
    backbone: nn.Module = model.backbone if whole else model  # type: ignore[assignment]
    theirs, rest = split(state)
    name = recognise(theirs, source)
    report = TranslationReport(name)
    ours = _translate(theirs, backbone, name, report)
    computed = FORMATS[name].computed(ours, backbone)
    ours = {key: value for key, value in ours.items() if key not in computed}
    report.dropped |= computed
    target = backbone.state_dict()
    if keep is not None:
        kept = {key for key in target if re.fullmatch(keep, key)}
        ours = {key: value for key, value in ours.items() if key not in kept}
        target = {key: value for key, value in target.items() if key not in kept}
        report.kept += sorted(kept)
    _check_norms(ours, backbone, name, warm_start)
    ours = _fit(ours, target, report, resize)
    _check_heads(ours, backbone, name, configured=settings is not None)
    report.note = FORMATS[name].note(ours)
    known = settings is not None and check_origin(settings, backbone, resize)
    if not known and (why_not := FORMATS[name].check(backbone)):
        raise ValueError(f'{name} files {why_not}')
    _check_warm_start(backbone, warm_start)
    report.used += len(ours)
    filled = _fill(ours, target, report, backbone, warm_start)
    _check_eps(ours, theirs, backbone, name)
    ours |= filled
    if not whole:
        report.dropped |= dict.fromkeys(rest, 'not part of a backbone')
        return ours, report
    others = {key: value for key, value in model.state_dict().items() if not key.startswith('backbone.')}
    fitting = _fit(_heads_as_in(others, rest), others, report, resize, ends='.*')
    report.used += len(fitting)
    report.kept += sorted({key.rpartition('.')[0] for key in others.keys() - fitting.keys()})
    return {f'backbone.{key}': value for key, value in ours.items()} | fitting, report


def split(state: State) -> tuple[State, State]:
    """Splits a state dict into the tensors of the backbone and those of necks and heads."""
    for prefix in ('backbone.', 'teacher.module.backbone.'):  # the second prefix occurs in DINO's files
        if any(key.startswith(prefix) for key in state):
            theirs = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
            return theirs, {key: value for key, value in state.items() if not key.startswith(prefix)}
    # The DTN authors' plain ViT calls its head ``mlp_head``.
    state = {key.replace('mlp_head.1.', 'head.'): value for key, value in state.items()}
    theirs = {key: value for key, value in state.items() if not key.startswith(('head.', 'head_dist.'))}
    return theirs, {key: value for key, value in state.items() if key not in theirs}


def _heads_as_in(target: State, rest: State) -> State:
    """Renames the tensors of the head. The last layer is named as in ``target``, and LeViT's head as in MMPretrain."""
    last = next((name for name in LAST_LAYERS if any(key.startswith(name) for key in target)), LAST_LAYERS[0])
    out: State = {}
    for key, value in rest.items():
        key = re.sub(r'^head\.(fc\.|layers\.head\.)?(?=(weight|bias)$)', last, key)
        key = re.sub(r'^(head|head_dist)\.(bn\.|linear\.)', r'head.\1.\2', key.replace('.l.', '.linear.'))
        out[key] = value
    return out


def _translate(theirs: State, backbone: nn.Module, name: str, report: TranslationReport) -> State:
    kind = FORMATS[name]
    if kind.backbone != type(backbone).__name__:
        raise ValueError(f'A {name} file is for a {kind.backbone}, but the target has a {type(backbone).__name__}.')
    for pattern, why in kind.dropped.items():
        report.dropped |= {key: why for key in theirs if re.match(pattern, key)}
    try:
        out = kind.convert({key: value for key, value in theirs.items() if key not in report.dropped})
    except (RuntimeError, IndexError, KeyError, TypeError) as error:  # the tensors have unexpected shapes
        raise ValueError(f'The tensors are not those of a complete {name} file: {str(error).splitlines()[0]}') from None
    return out


def _fit(ours: State, target: State, report: TranslationReport, resize: bool, ends: str = ENDS) -> State:
    """Returns the tensors that ``target`` contains, with the target's dtypes. Raises ValueError if shapes differ."""
    extra = [key for key in ours if key not in target]
    if strange := [key for key in extra if not re.fullmatch(ends, key)]:
        raise ValueError(f'The target has no {_some(strange)}. It may have another architecture or depth.')
    report.dropped |= dict.fromkeys(extra, 'the target has no such part')
    out = {}
    wrong = []
    for key in (key for key in ours if key in target):
        value, want = ours[key], target[key]
        if value.shape != want.shape and resize and (resized := _resize(key, value, want)) is not None:
            report.filled[key] = f'resized from {tuple(value.shape)} to {tuple(want.shape)}'
            value = resized
        if value.is_floating_point() != want.is_floating_point():
            wrong.append(f'{key} is {value.dtype} in the file, but {want.dtype} in the target')
        elif value.shape != want.shape:
            hint = ' (resize=True, or --resize, interpolates it)' if _resize(key, value, want) is not None else ''
            wrong.append(f'{key} is {tuple(value.shape)} in the file, but {tuple(want.shape)} in the target{hint}')
        else:
            out[key] = value.to(want.dtype).clone()
    if wrong:
        raise ValueError(f'These tensors do not fit: {_some(wrong)}.')
    return out


def _resize(key: str, value: Tensor, want: Tensor) -> Tensor | None:
    """Interpolates position embeddings and bias tables to the shape of ``want``. Returns None for other tensors."""
    if key.endswith('pos_embed') and value.dim() == 4 and value.shape[3] == want.shape[3]:
        return resample_abs_pos_embed_nhwc(value, list(want.shape[1:3]))
    if key.endswith('relative_position_bias_table') and value.dim() == 2 and value.shape[1] == want.shape[1]:
        window = (math.isqrt(len(want)) + 1) // 2
        return resize_rel_pos_bias_table(value, (window, window), tuple(want.shape))
    if key.endswith('attention_biases') and value.dim() == 2 and len(value) == len(want):  # by distance, starting at 0
        sides = [math.isqrt(table.shape[1]) for table in (value, want)]
        if [side**2 for side in sides] == [value.shape[1], want.shape[1]]:
            square = value.view(1, len(value), sides[0], sides[0])
            return F.interpolate(square, (sides[1], sides[1]), mode='bicubic', align_corners=True).flatten(2)[0]
    return None


def _check_heads(ours: State, backbone: nn.Module, name: str, configured: bool) -> None:
    """Raises ValueError if the number of heads differs from that in the file. Tensor shapes do not show this number."""
    for key in ours:
        if not re.search(r'\.attn\.(q|qkv)\.weight$', key) or (FORMATS[name].is_own and configured):
            continue
        attention = key.rpartition('.attn.')[0] + '.attn'
        heads, given = FORMATS[name].heads(attention, ours), backbone.get_submodule(attention).num_heads
        possible = heads if isinstance(heads, tuple) else (heads,)
        if heads is not None and given not in possible:
            example = f'num_heads={possible[0]})'
            if FORMATS[name].backbone == 'PVTDTN':
                stages = tuple(FORMATS[name].heads(f'stages.{i}.blocks.0.attn', ours) for i in range(4))
                example = f'num_heads={stages}, norm_heads=(4, 4, 5, 8)), where norm_heads are the heads of DTN'
            note = FORMATS[name].note(ours)
            note = f' In this file: {note}' if note else ''
            raise ValueError(
                f'{attention} has {" or ".join(map(str, possible))} heads in {name} files, but {given} in the target. '
                f'Choose an arch with the heads of the file, such as arch=dict(base=..., {example}.{note}'
            )


def _check_norms(ours: State, backbone: nn.Module, name: str, warm_start: float | None) -> None:
    """Raises ValueError if a norm differs from the norm in the file. Some formats do not specify norms."""
    modules = dict(backbone.named_modules())
    for norm in sorted({match[1] for key in ours if (match := re.match(r'(.*\bnorm[0-3]?)\.', key))} & modules.keys()):
        possible = FORMATS[name].norms(norm, ours)
        if possible and not any(_is_norm(modules, norm, cfg, warm_start) for cfg in possible):
            cfgs = ' or '.join(
                f'dict({", ".join(f"{key}={value!r}" for key, value in cfg.items())})' for cfg in possible
            )
            groups = ', with one group for each head of the attention' if hasattr(modules[norm], 'num_groups') else ''
            raise ValueError(
                f'{norm} is {cfgs} in this {name} file{groups}, but {in_one_line(modules[norm])} in the target. The '
                'target would compute different outputs. Use the norm of the file in norm_cfg or other_norm_cfg, '
                'whichever this norm is built from.'
            )


def _is_norm(modules: Mapping[str, nn.Module], norm: str, cfg: Mapping[str, Any], warm_start: float | None) -> bool:
    """Returns whether a norm has the settings in ``cfg``. A warm start may replace LayerNorm with DTN."""
    module = modules[norm]
    if warm_start is not None and cfg['type'] == 'LN' and isinstance(module, DTN):
        return module.eps == cfg['eps']
    has = module.options if isinstance(module, DTN) else vars(module)
    irrelevant = {'type'} | ({'pool_second_moment'} if has.get('pool_size') == 1 else set())
    attention = modules.get(f'{norm.rpartition(".")[0]}.attn')
    groups = getattr(attention, 'num_heads', None)
    return (
        type(module) is norm_class(dict(cfg))
        and all(has.get(key) == value for key, value in cfg.items() if key not in irrelevant)
        and (groups is None or has.get('num_groups', groups) == groups)
    )


def _check_eps(ours: State, theirs: State, backbone: nn.Module, name: str) -> None:
    """Raises ValueError if the eps of a norm differs from its eps in the file."""
    for norm, module in backbone.named_modules():
        if not isinstance(module, (nn.LayerNorm, DTN)) or f'{norm}.weight' not in ours:
            continue
        if FORMATS[name].norms(norm, ours):
            continue  # _check_norms has compared eps
        eps = FORMATS[name].eps(norm, ours)
        if eps is not None and eps != module.eps:
            needed = FORMATS[name].settings(theirs).get('other_norm_cfg')
            example = f' For this file, set other_norm_cfg={needed}.' if needed else ''
            raise ValueError(
                f'{norm} has eps={eps} in {name} files, but eps={module.eps} in the target. The target would compute '
                'different outputs. Use the eps of the file in norm_cfg or other_norm_cfg, whichever this norm is '
                f'built from.{example}'
            )


def _check_warm_start(backbone: nn.Module, warm_start: float | None) -> None:
    layers = [m for m in backbone.modules() if isinstance(m, DTN)]
    for layer in layers:
        s = layer.settings
        if warm_start is not None and (s.prenorm or layer.mean_mix is None or layer.var_mix is None):
            raise ValueError(
                "A warm start needs norm_cfg=dict(type='DTN', prenorm=False) with both lambdas learned, but the target "
                f'has DTN({layer.extra_repr()}).'
            )
    if warm_start is not None and not layers:
        raise ValueError('A warm start replaces LayerNorm by DTN, but the target has no DTN layer.')


def _fill(
    ours: State, target: State, report: TranslationReport, backbone: nn.Module, warm_start: float | None
) -> State:
    """Returns values for parameters that the file lacks: start values for DTN, and zeros for missing biases.

    Parameters at the end of the backbone keep their initial values. Any other missing parameter raises an error.
    """
    out = {}
    missing = [key for key in target if key not in ours]
    without = [key for key in missing if key.rpartition('.')[2] in DTN_PARAMETERS and '.rpe.' not in key]
    if without and warm_start is None:
        raise ValueError(
            f'The target has DTN layers, but the file has no {_some(without)}. If the file has LayerNorm, use a warm '
            'start: warm_start=0.999 in init_cfg, or --warm-start.'
        )
    for key in without:
        assert warm_start is not None
        if key.endswith('position'):
            out[key], report.filled[key] = target[key].clone(), 'local start'
        else:
            out[key], report.filled[key] = torch.full_like(target[key], mix_of(warm_start)), f'lambda {warm_start}'
    for key in (key for key in missing if key not in without):
        if re.search(r'\.attn\.(q|kv)\.bias$', key):  # the DTN authors' ViT has no such bias
            out[key], report.filled[key] = torch.zeros_like(target[key]), 'zero: the file has no such bias'
        elif key.endswith('.attn.rpe.position'):
            out[key], report.filled[key] = torch.zeros_like(target[key]), 'zero: the attention in the file has no rpe'
        elif re.fullmatch(ENDS, key):
            report.kept.append(key)
    if lost := [key for key in missing if key not in out and key not in report.kept]:
        raise ValueError(
            f'The file has no {_some(lost)}, which the target needs. The file may be incomplete, or have '
            'another architecture.'
        )
    return out


def _some(items: list[str]) -> str:
    return '; '.join(items[:4]) + (f' and {len(items) - 4} more' if len(items) > 4 else '')
