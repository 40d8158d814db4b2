"""Replaces LayerNorm with DTN, or with another normaliser, in a model that was not written for DTN."""

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

FEWEST_TOKENS = 7  # per side; on a smaller grid a neighbourhood covers most of the image
POOL_SIZES = (1, 2, 4, 8)
CELLS = 14  # number of pooled cells per side in all stages of the paper's models at 224 pixels
SUMMARY = 5  # maximum number of lines
BY_REQUEST = EXCLUDED, NOT_INCLUDED = 'is excluded', 'is not included'
Patterns = str | Sequence[str] | None


@dataclass
class Converted:
    """A converted norm with its token grid for the example size and the layout that gives the grid for any size."""

    norm: str
    grid: Size
    layout: Layout

    def __str__(self) -> str:
        prefix = self.layout.prefix
        after = f', after {prefix} other token{"s"[: prefix - 1]}' if prefix else ''
        return f'{self.norm}, {by(self.grid)} tokens as {self.layout.form}{after}'


@dataclass
class ConversionReport:
    """Lists the converted norms of a model, the norms that were not converted, and other normalisation layers.

    ``print(report)`` shows a summary. ``print(report.details())`` shows one line for each norm.
    """

    model: str
    sizes: list[Size]
    converted: dict[str, Converted] = field(default_factory=dict)  # by name
    kept: dict[str, str] = field(default_factory=dict)  # reasons, by the name of the norm
    others: dict[str, str] = field(default_factory=dict)  # normalisation that is not LayerNorm, by name
    left_in_blocks: int = 0  # number of norms in residual blocks that could not be converted

    def __str__(self) -> str:
        grids = Counter(by(norm.grid) for norm in self.converted.values())
        lines = [self._headline()]
        if grids:
            lines.append('  converted: ' + ', '.join(f'{number} on {grid} tokens' for grid, number in grids.items()))
        lines += [f'  {number} not converted, because each {why}' for why, number in self.reasons().most_common()]
        if self.others:
            kinds = Counter(self.others.values()).most_common()
            lines.append('  other normalisation: ' + ', '.join(f'{number} {what}' for what, number in kinds))
        if len(lines) > SUMMARY:
            lines[SUMMARY - 1 :] = [
                f'  and {len(lines) - SUMMARY + 1} more lines; print(report.details()) shows all norms'
            ]
        return '\n'.join(lines)

    def reasons(self) -> Counter[str]:
        """Counts the norms that were not converted, by kind of reason."""
        return Counter(why.partition(':')[0] for why in self.kept.values())

    def details(self) -> str:
        """Returns the first line of the summary, followed by one line for each norm."""
        lines = [self._headline()]
        lines += [f'  {name}: {norm}' for name, norm in self.converted.items()]
        lines += [f'  {name} is not converted, because it {why}' for name, why in self.kept.items()]
        lines += [f'  {name} is not a LayerNorm: {what}' for name, what in self.others.items()]
        return '\n'.join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Returns the whole report as a dict that can be written as JSON."""
        return asdict(self)

    def _headline(self) -> str:
        taken = ', '.join(map(by, self.sizes))
        alone = ', the only size that the model takes' if len(self.sizes) == 1 else ''
        what = f'{len(self.converted)} of {len(self.converted) + len(self.kept)} LayerNorm layers converted'
        if self.converted and self.left_in_blocks:
            what = f'{what}, {self.left_in_blocks} in residual blocks not converted'
        return f'{self.model}: {what}; tried with images of {taken}{alone}'


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
    """Replaces LayerNorm with DTN in the residual blocks of ``model``, in place, and reports the outcome for each norm.

    The function runs the model on images of three sizes to find the token grid of each norm. It then runs the model on
    mixtures of images to prove that the tokens are in row-by-row order. A norm without this proof is not converted. The
    conversion keeps all keys of the state dict. DTN adds ``mean_mix``, ``var_mix`` and ``position`` to each norm.

    Args:
        model: Model that takes a batch of images as its first argument, unless ``call`` is given.
        example_size: Image size as ``(height, width)`` for three channels, or as ``(channels, height, width)``.
        norm_cfg: Config of the new norm, which is DTN or another normaliser such as ``dict(type='IN')``. The new norm
            takes ``eps`` from the old norm unless the config sets it. It takes the weight and the bias from the old
            norm where they have the same meaning.
        warm_start: Initial value of both lambdas of every DTN. With 1, the outputs of the model stay the same. With
            None, the lambdas keep DTN's own initial value of 1/2.
        num_heads: Number of heads of DTN, or of groups of another normaliser. ``'auto'`` takes the number of heads of
            the attention in the block if it divides the number of channels, and 1 otherwise.
        pool_size: Pool size of DTN. ``'auto'`` chooses 1, 2, 4 or 8, whichever pools the grid for the example size to a
            number of cells per side closest to 14.
        include: Regular expressions that are searched for in the names of norms. Norms with a match are converted, even
            outside residual blocks and on small grids. None converts the norms in residual blocks that have at least 7
            tokens per side.
        exclude: Regular expressions that are searched for in the names of norms. Norms with a match are not converted.
        call: Function that calls the model with a batch of images, for models that take a dict or further arguments.
            The default is ``lambda model, images: model(images)``.

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
    """Builds ``backbone`` and converts its norms by calling :func:`convert_norms` with ``options``.

    This function lets a config use a converted backbone. It returns the model without a wrapper, so checkpoints of the
    model with LayerNorm load unchanged. The ``init_cfg`` of the inner backbone can load such checkpoints.

    Example:
        backbone=dict(type='ConvertedBackbone', backbone=dict(type='mmdet.SwinTransformer', embed_dims=96))
    """
    model = MODELS.build(backbone)
    report = convert_norms(model, **options)
    if not report.converted:
        raise ValueError(f'ConvertedBackbone found no norm that it can convert. {report}')
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
                f'include and exclude take regular expressions, but {pattern!r} is not one: {error}. To match a '
                r'special character itself, put a backslash in front of it, as in r"\(".'
            ) from None
        if not found:
            raise ValueError(f'{pattern!r} does not match the name of any LayerNorm. The first names are {names[:3]}.')


def _why_not(f: Found, including: list[str] | None, excluding: list[str] | None) -> str:
    if any(re.search(pattern, f.name) for pattern in excluding or ()):
        return EXCLUDED
    if including is not None and not any(re.search(pattern, f.name) for pattern in including):
        return NOT_INCLUDED
    if f.why:
        return f.why
    if including is None and not f.in_block:
        where = f.parent or 'the model'
        return f'is not in a residual block: {where} does not return its input when its branches have zero weights'
    if including is None and f.layout and min(f.grid) < FEWEST_TOKENS:
        return f'has a grid of {by(f.grid)} tokens: at least {FEWEST_TOKENS} per side are needed'
    return ''


def _heads(block: nn.Module, channels: int) -> int:
    said = [getattr(m, name, None) for m in block.modules() for name in ('num_heads', 'num_attention_heads')]
    heads = next((number for number in said if isinstance(number, int)), 1)
    return heads if heads > 0 and channels % heads == 0 else 1


def _pool_size(grid: Size) -> int:
    return min(POOL_SIZES, key=lambda side: abs(max(grid) / side - CELLS))


def _like(old: Any, norm_cfg: dict[str, Any], place: Place, warm_start: float | None) -> nn.Module:
    """Builds the norm that replaces ``old``, and copies the weight and the bias of ``old`` into it."""
    like_old = dict(eps=old.eps, affine=old.weight is not None)
    known = inspect.signature(norm_class(norm_cfg)).parameters
    cfg = {name: value for name, value in like_old.items() if name in known} | norm_cfg
    new: Any = build_norm(cfg, old.normalized_shape[0], place)
    with torch.no_grad():
        if isinstance(new, DTN) and warm_start is not None:
            if new.settings.prenorm or new.mean_mix is None or new.var_mix is None:
                raise ValueError(
                    "warm_start needs norm_cfg=dict(type='DTN', prenorm=False) with both lambdas learned, but norm_cfg "
                    f'gives {new}. Pass warm_start=None to keep the initial lambdas of this DTN.'
                )
            for mix in (new.mean_mix, new.var_mix):
                mix.fill_(mix_of(warm_start))
        if old.weight is not None:
            new.to(old.weight.device, old.weight.dtype)
        for name, start in (('weight', 1), ('bias', 0)):
            source, target = getattr(old, name), getattr(new, name, None)
            if target is None or target.shape != old.normalized_shape or not (target == start).all():
                continue  # the new norm uses this name for another kind of parameter
            if source is None:
                target.requires_grad_(False)
            else:
                target.copy_(source).requires_grad_(target.requires_grad and source.requires_grad)
    return new.train(old.training)
