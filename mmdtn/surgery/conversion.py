"""DTN, or a sibling, in the place of LayerNorm in a model that was not written for it."""

import inspect
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
from mmengine.logging import print_log
from mmengine.registry import MODELS
from torch import Tensor, nn

from mmdtn.norms import DTN, Place, build_norm, norm_class
from mmdtn.norms.dtn import mix_of

from .grids import Call, Found, layer_norms, survey
from .image_size import ImageSize, Placed, channels_first_again
from .layouts import Layout, Size, by

FEWEST_TOKENS = 7  # a side: neighbourhoods of fewer are most of the image
POOL_SIZES = (1, 2, 4, 8)
CELLS = 14  # a side, which the paper's pool sizes make of every stage at 224 pixels
SUMMARY = 5  # lines
BY_REQUEST = EXCLUDED, NOT_INCLUDED = 'is excluded', 'is not included'
Patterns = str | Sequence[str] | None


@dataclass
class Converted:
    """A new norm, and where the tokens lie that it is given: for the example's size, and for any."""

    norm: str
    grid: Size
    layout: Layout

    def __str__(self) -> str:
        prefix = self.layout.prefix
        behind = f', behind {prefix} other token{"s"[: prefix - 1]}' if prefix else ''
        return f'{self.norm}, {by(self.grid)} tokens as {self.layout.form}{behind}'


@dataclass
class ConversionReport:
    """What became of each LayerNorm of a model, and which other normalisation it has.

    ``print(report)`` shows a summary, ``print(report.details())`` a line for each norm.
    """

    model: str
    sizes: list[Size]
    converted: dict[str, Converted] = field(default_factory=dict)  # by name
    kept: dict[str, str] = field(default_factory=dict)  # why
    others: dict[str, str] = field(default_factory=dict)  # what: no LayerNorm
    left_in_blocks: int = 0  # norms of residual blocks that were to be converted and could not be

    def __str__(self) -> str:
        grids = Counter(by(norm.grid) for norm in self.converted.values())
        lines = [self._headline()]
        if grids:
            lines.append('  converted: ' + ', '.join(f'{number} on {grid} tokens' for grid, number in grids.items()))
        lines += [f'  {number} not converted: each {why}' for why, number in self.reasons().most_common()]
        if self.others:
            kinds = Counter(self.others.values()).most_common()
            lines.append('  no LayerNorm: ' + ', '.join(f'{number} {what}' for what, number in kinds))
        if len(lines) > SUMMARY:
            lines[SUMMARY - 1 :] = [
                f'  and {len(lines) - SUMMARY + 1} lines more; print(report.details()) shows all norms'
            ]
        return '\n'.join(lines)

    def reasons(self) -> Counter[str]:
        """How many norms were left alone for each kind of reason."""
        return Counter(why.partition(':')[0] for why in self.kept.values())

    def details(self) -> str:
        """The summary's first line, and a line for each norm."""
        lines = [self._headline()]
        lines += [f'  {name}: {norm}' for name, norm in self.converted.items()]
        lines += [f'  {name} stays, as it {why}' for name, why in self.kept.items()]
        lines += [f'  {name} is no LayerNorm: {what}' for name, what in self.others.items()]
        return '\n'.join(lines)

    def to_dict(self) -> dict[str, Any]:
        """All of it in types that JSON has."""
        return asdict(self)

    def _headline(self) -> str:
        taken = ', '.join(map(by, self.sizes))
        alone = '; it takes no other size' if len(self.sizes) == 1 else ''
        number = f'{len(self.converted)} of {len(self.converted) + len(self.kept)} LayerNorm'
        what = f'{number} converted'
        if self.converted and self.left_in_blocks:
            what = f'converted in part: {number}, and {self.left_in_blocks} of residual blocks stay'
        return f'{self.model}: {what}; seen at {taken}{alone}'


def convert_norms(
    model: nn.Module,
    example_size: tuple[int, ...] = (224, 224),
    *,
    norm_cfg: dict[str, Any] = dict(type='DTN', prenorm=False),  # noqa: B006  # MM's convention; never written to
    warm_start: float | None = 0.999,
    num_heads: int | Literal['auto'] = 'auto',
    pool_size: int | Literal['auto'] = 'auto',
    include: Patterns = None,
    exclude: Patterns = None,
    call: Call | None = None,
) -> ConversionReport:
    """Replaces LayerNorm by DTN in the residual blocks of ``model``, in place, and reports what became of each norm.

    Runs the model at three sizes to find the grid of each norm's input, and on mixtures of images to prove that the
    tokens lie row by row. A norm without such a proof stays LayerNorm. The keys of the state dict stay; DTN adds
    ``mean_mix``, ``var_mix`` and ``position`` to each norm.

    Args:
        model: Takes a batch of images as its first argument, unless ``call`` is given.
        example_size: ``(height, width)`` of images with three channels, or ``(channels, height, width)``.
        norm_cfg: The new norm: DTN, or a sibling such as ``dict(type='IN')`` in DTN's places. ``eps`` stays the old
            norm's unless it is in here. Weights and biases stay where they mean the same in the new norm.
        warm_start: Both lambdas of every DTN. At 1 the model computes what it did. None leaves DTN's own start, 1/2.
        num_heads: DTN's heads, and groups of siblings; ``'auto'``: as many as the block's attention has, if that
            divides the channels, else 1.
        pool_size: ``'auto'``: that of 1, 2, 4, 8 with which the example's grid comes closest to 14 cells a side.
        include: Regular expressions to search the names of norms for: then these are converted, wherever they are.
            None: those of residual blocks, on grids of at least 7 tokens a side.
        exclude: Regular expressions of names that stay.
        call: Calls the model with a batch of images, for models that need another argument or a dict. The default is
            ``lambda model, images: model(images)``.

    Example:
        >>> model = timm.create_model('pvt_v2_b0')
        >>> report = convert_norms(model)
        >>> len(report.converted), report.kept['norm']
    """
    including, excluding = (None if p is None else [p] if isinstance(p, str) else list(p) for p in (include, exclude))
    _check_patterns([*(including or ()), *(excluding or ())], [*layer_norms(model)])
    found = survey(model, example_size, call or _plainly, lambda f: not _why_not(f, including, excluding))
    report = ConversionReport(type(model).__name__, found.sizes, others=found.others)
    image = ImageSize(found.sizes[0] if len(found.sizes) == 1 else None)
    modules, new, told = dict(model.named_modules()), {}, False
    for f in found.norms:
        if why := _why_not(f, including, excluding):
            report.kept[f.name] = why
            report.left_in_blocks += f.in_block and why not in BY_REQUEST
            continue
        assert f.layout is not None
        old: Any = modules[f.name]
        place = Place(
            num_heads if isinstance(num_heads, int) else _heads(modules[f.parent], old.normalized_shape[0]),
            pool_size if isinstance(pool_size, int) else _pool_size(f.grid),
        )
        norm = new[old] = _like(old, norm_cfg, place, warm_start)
        takes_grid = isinstance(norm, DTN) and f.layout.form == 'B x T x C'
        told |= takes_grid
        norm.register_forward_pre_hook(Placed(f.layout, image if takes_grid else None), with_kwargs=True)
        if f.layout.form == 'B x C x H x W':
            norm.register_forward_hook(channels_first_again)
        report.converted[f.name] = Converted(repr(norm), f.grid, f.layout)
    for path, module in list(model.named_modules(remove_duplicate=False)):
        if module in new:
            parent, _, name = path.rpartition('.')
            setattr(model.get_submodule(parent), name, new[module])
    if told:
        for module in {model, model.get_submodule(found.entrance)}:
            module.register_forward_pre_hook(image.enter, with_kwargs=True)
        model.register_forward_hook(image.leave, always_call=True)
    return report


@MODELS.register_module(name='ConvertedBackbone')
def converted_backbone(backbone: dict[str, Any], **options: Any) -> nn.Module:
    """For configs: the model that ``backbone`` builds, behind :func:`convert_norms` with ``options``.

    It is the model itself, not a wrapper, so checkpoints of it with LayerNorm load as they are, also by its own
    ``init_cfg``.

    Example:
        backbone=dict(type='ConvertedBackbone', backbone=dict(type='mmdet.SwinTransformer', embed_dims=96))
    """
    model = MODELS.build(backbone)
    report = convert_norms(model, **options)
    if not report.converted:
        raise ValueError(f'ConvertedBackbone found no norm to convert. {report}')
    print_log(str(report), 'current')
    return model


def _plainly(model: nn.Module, images: Tensor) -> Any:
    return model(images)


def _check_patterns(patterns: list[str], names: list[str]) -> None:
    for pattern in patterns:
        try:
            found = any(re.search(pattern, name) for name in names)
        except re.error as error:
            raise ValueError(
                f'include and exclude take regular expressions, and {pattern!r} is none: {error}. For the character '
                r'itself write a backslash in front of it, as in r"\(".'
            ) from None
        if not found:
            raise ValueError(f'{pattern!r} is in the name of no LayerNorm; their names are like {names[:3]}.')


def _why_not(f: Found, including: list[str] | None, excluding: list[str] | None) -> str:
    if any(re.search(pattern, f.name) for pattern in excluding or ()):
        return EXCLUDED
    if including is not None and not any(re.search(pattern, f.name) for pattern in including):
        return NOT_INCLUDED
    if f.why:
        return f.why
    if including is None and not f.in_block:
        where = f.parent or 'the model'
        return f'is in no residual block: with weights of zero {where} does not return what it is given'
    if including is None and f.layout and min(f.grid) < FEWEST_TOKENS:
        return f'has a grid of {by(f.grid)} tokens: less than {FEWEST_TOKENS} a side'
    return ''


def _heads(block: nn.Module, channels: int) -> int:
    said = [getattr(m, name, None) for m in block.modules() for name in ('num_heads', 'num_attention_heads')]
    heads = next((number for number in said if isinstance(number, int)), 1)
    return heads if heads > 0 and channels % heads == 0 else 1


def _pool_size(grid: Size) -> int:
    return min(POOL_SIZES, key=lambda side: abs(max(grid) / side - CELLS))


def _like(old: Any, norm_cfg: dict[str, Any], place: Place, warm_start: float | None) -> nn.Module:
    """A norm for the place of ``old``, with what it has learned."""
    like_old = dict(eps=old.eps, affine=old.weight is not None)
    known = inspect.signature(norm_class(norm_cfg)).parameters
    cfg = {name: value for name, value in like_old.items() if name in known} | norm_cfg
    new: Any = build_norm(cfg, old.normalized_shape[0], place)
    with torch.no_grad():
        if isinstance(new, DTN) and warm_start is not None:
            if new.settings.prenorm or new.mean_mix is None or new.var_mix is None:
                raise ValueError(
                    "warm_start needs norm_cfg=dict(type='DTN', prenorm=False) with both lambdas learned, but norm_cfg "
                    f'gives {new}. With warm_start=None its lambdas start where they are.'
                )
            for mix in (new.mean_mix, new.var_mix):
                mix.fill_(mix_of(warm_start))
        if old.weight is not None:
            new.to(old.weight.device, old.weight.dtype)
        for name, start in (('weight', 1), ('bias', 0)):
            source, target = getattr(old, name), getattr(new, name, None)
            if target is None or target.shape != old.normalized_shape or not (target == start).all():
                continue  # not what LayerNorm has under this name
            if source is None:
                target.requires_grad_(False)
            else:
                target.copy_(source).requires_grad_(target.requires_grad and source.requires_grad)
    return new.train(old.training)
