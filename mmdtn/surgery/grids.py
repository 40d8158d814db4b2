"""Where the tokens lie that each LayerNorm of a model is given: found by running the model, proved by gradients.

Used by :mod:`mmdtn.surgery.conversion`, on models that know nothing of this package.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from mmdtn.errors import first_line
from mmdtn.norms.base import TORCHS_BATCH_AND_INSTANCE_NORMS
from mmdtn.norms.dtn import MANY_PREFIX_TOKENS

Size = tuple[int, int]  # height, width
BATCH = 2  # so that windows, which models put into the batch, show
STRIDES = range(1, 65)
CHECKPOINTING = ('with_cp', 'grad_checkpointing', 'gradient_checkpointing')  # MM's name for it, timm's, Hugging Face's
TRIES = 8  # random weights to prove an order with
PLACES = ((0.2, 0.7), (0.7, 0.2), (0.45, 0.95), (0.95, 0.4))  # of tokens whose gradients are taken: none near (y, y)


class TokenAxis(NamedTuple):
    """Tokens along one side of an image: ``(side + shift) // stride``."""

    shift: int
    stride: int

    def tokens(self, side: int) -> int:
        return (side + self.shift) // self.stride


class Layout(NamedTuple):
    """Where the tokens of an input lie."""

    form: str  # 'B x H x W x C', 'B x C x H x W' or 'B x T x C'
    rows: TokenAxis
    columns: TokenAxis
    prefix: int = 0  # tokens in front of the grid

    def grid(self, size: Size) -> Size:
        return self.rows.tokens(size[0]), self.columns.tokens(size[1])

    def on_grid(self, tokens: Tensor, grid: Size) -> Tensor:
        """``B x h x w x C``."""
        if self.form == 'B x T x C':
            return tokens[:, self.prefix :].unflatten(1, grid)
        return tokens if self.form == 'B x H x W x C' else tokens.permute(0, 2, 3, 1)


@dataclass
class Found:
    """What is known of the inputs of one LayerNorm; ``why`` says what keeps it from being normalised on a grid."""

    name: str
    parent: str
    grid: Size = (0, 0)  # for the example
    layout: Layout | None = None
    in_block: bool = False
    why: str = ''


@dataclass
class Survey:
    """What runs of a model showed."""

    norms: list[Found]
    others: dict[str, str]  # what normalises and is no module of LayerNorm
    sizes: list[Size] = field(default_factory=list)  # that the model takes; the example first


def survey(model: nn.Module, example: tuple[int, ...]) -> Survey:
    """Runs ``model`` on images of up to three sizes, ``example`` first, and once with gradients. Nothing in it changes.

    ``example`` is ``(height, width)`` of images with three channels, or ``(channels, height, width)``.
    """
    if not isinstance(example, tuple | list) or len(example) not in (2, 3):
        raise ValueError(f'example_size={example!r}: give (height, width), or (channels, height, width).')
    channels, size = (3, example) if len(example) == 2 else (example[0], example[1:])
    size = (size[0], size[1])
    names = {name: module for name, module in model.named_modules() if isinstance(module, nn.LayerNorm)}
    with _in_evaluation(model):
        watched = _Watch(model, names)
        try:
            watched.run(_images(model, channels, size), size, closely=True)
        except Exception as error:
            raise ValueError(
                f'{type(model).__name__} cannot be run on images of {BATCH} x {channels} x {size[0]} x {size[1]}, as '
                f'finding its grids takes: {type(error).__name__}: {first_line(error).rstrip(".")}. Give '
                'example_size=(height, width) or (channels, height, width) of images that it takes.'
            ) from error
        blocks = {name for name, call in watched.first_call.items() if _hands_on(watched.modules[name], *call)}
        sizes = [size, *_other_sizes(watched, model, channels, size)]
        found = [_look_at(name, watched, blocks, sizes) for name in names]
        for seed in range(TRIES):
            if all(f.layout is not None or not possible for f, possible in found):
                break
            _prove_order(model, names, found, _images(model, channels, size, len(PLACES)), seed)
    return Survey([f for f, _ in found], watched.others, sizes)


@contextmanager
def _in_evaluation(model: nn.Module) -> Iterator[None]:
    """And without activation checkpointing, which some models do in evaluation too: it computes blocks twice."""
    before = [
        (module, name, getattr(module, name))
        for module in model.modules()
        for name in ('training', *CHECKPOINTING)
        if isinstance(getattr(module, name, None), bool)
    ]
    model.eval()
    for module, name, _ in before:
        setattr(module, name, False)
    try:
        with torch.no_grad():
            yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)  # not by train(), with which frozen stages would do something of their own


def _images(model: nn.Module, channels: int, size: Size, number: int = BATCH) -> Tensor:
    like = next(model.parameters())
    numbers = torch.randn(number, channels, *size, generator=torch.Generator().manual_seed(0))
    return numbers.to(like.device, like.dtype)


def _other_sizes(watched: '_Watch', model: nn.Module, channels: int, size: Size) -> list[Size]:
    """Two sizes of unequal sides that the model takes; none for a model that takes the example's alone."""
    height, width = size
    h, w = (max(64, side // 64 * 64) for side in size)
    h32, w32 = (max(64, side // 32 * 32) for side in size)
    for pair in (
        # One pixel more and one less than multiples of 64 tell apart how strides round, up to 64.
        ((h + 1, w + 63), (h + 63, w + 65)),
        ((h32 + 32, w32 + 96), (h32 + 64, w32 + 32)),
        ((height, 2 * width), (2 * height, width)),  # windows that divide the example's grid divide these
    ):
        try:
            for another in pair:
                watched.run(_images(model, channels, another), another)
        except Exception:  # models refuse sizes by errors of every kind
            for another in pair:
                watched.shapes.pop(another, None)
        else:
            return list(pair)
    return []


class _Watch(TorchFunctionMode):
    """Notes what the norms of a model are given as it runs."""

    def __init__(self, model: nn.Module, norms: dict[str, nn.LayerNorm]) -> None:
        super().__init__()
        self.model, self.norms = model, norms
        self.shapes: dict[Size, dict[str, list[tuple[int, ...]]]] = {}  # by image and norm, of each call
        self.form: dict[str, str] = {}  # by the axis that it normalises
        self.first_call: dict[str, tuple[tuple, dict]] = {}  # of the modules that call norms
        self.modules = modules = dict(model.named_modules())
        self.others = {
            name: type(module).__name__
            for name, module in modules.items()
            if 'norm' in type(module).__name__.lower() and name not in norms
            if isinstance(module, TORCHS_BATCH_AND_INSTANCE_NORMS) or not any(module.children())
        }
        self.parents = {name: _parent(name, modules) for name in norms}
        self._inside: list[str] = []  # the modules that are being called, from the outermost on

    def run(self, images: Tensor, size: Size, closely: bool = False) -> None:
        self.shapes[size] = {}
        with ExitStack() as stack:
            for name, norm in self.norms.items():
                note = partial(self._note, size, name, closely)
                stack.enter_context(norm.register_forward_hook(note, with_kwargs=True))
            if closely:
                for name, module in self.modules.items():
                    stack.enter_context(module.register_forward_pre_hook(partial(self._enter, name), with_kwargs=True))
                    stack.enter_context(module.register_forward_hook(lambda *_: self._inside.pop() and None))
                stack.enter_context(self)
            self.model(images)

    def _note(self, size: Size, name: str, closely: bool, norm: Any, args: Any, kwargs: Any, y: Any) -> None:
        x = args[0] if args else next(iter(kwargs.values()))
        self.shapes[size].setdefault(name, []).append(tuple(x.shape))
        if closely:
            self.form[name] = _form(norm, x, y)

    def _enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._inside.append(name)
        if name in self.parents.values():
            self.first_call.setdefault(name, (args, kwargs))

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is F.layer_norm and self._inside and self._inside[-1] not in self.norms:
            self.others[self._inside[-1]] = 'F.layer_norm, called by the module itself'
        return function(*args, **(kwargs or {}))


def _parent(name: str, modules: dict[str, nn.Module]) -> str:
    """The module whose forward calls this one: lists call nothing, and a Sequential is part of something."""
    while name:
        name = name.rpartition('.')[0]
        if not isinstance(modules[name], (nn.Sequential, nn.ModuleList, nn.ModuleDict)):
            break
    return name


def _hands_on(module: nn.Module, args: tuple, kwargs: dict) -> bool:
    """Whether a module is a residual block: with all its parameters at zero it returns what it was given."""
    zeros = {name: torch.zeros_like(p) for name, p in module.named_parameters()}
    given, given_too = (tree_map(lambda v: v.clone() if isinstance(v, Tensor) else v, v) for v in (args, kwargs))
    try:
        returned = _call(module, zeros, given, given_too)
    except Exception:  # of a module that divides by a parameter, say
        return False
    inputs = [v for v in tree_leaves(args) if isinstance(v, Tensor)]
    outputs = [v for v in tree_leaves(returned) if isinstance(v, Tensor)]
    return bool(outputs) and all(any(y.shape == x.shape and torch.equal(y, x) for x in inputs) for y in outputs)


def _call(module: nn.Module, parameters: dict[str, Tensor], args: tuple, kwargs: dict) -> Any:
    # With tied weights torch 2.12 leaves the new tensors in a module that has two names, as CoaT's convolutions have.
    return torch.func.functional_call(module, parameters, args, kwargs, tie_weights=False)


def _form(norm: Any, x: Tensor, y: Tensor) -> str:
    """Which axis a module normalises, by what it computes: a class's name does not tell."""
    if not isinstance(y, Tensor) or y.shape != x.shape or len(norm.normalized_shape) != 1:
        return ''
    (C,) = norm.normalized_shape

    def normalised(x: Tensor) -> Tensor:
        return F.layer_norm(x, (C,), norm.weight, norm.bias, norm.eps)

    close = partial(torch.allclose, rtol=0, atol=1e-4 if x.dtype == torch.float32 else 1e-1)
    if x.shape[-1] == C and close(y, normalised(x)):
        return {3: 'B x T x C', 4: 'B x H x W x C'}.get(x.dim(), '')
    if x.dim() == 4 and x.shape[1] == C:
        last = normalised(x.permute(0, 2, 3, 1))
        return 'B x C x H x W' if close(y, last.permute(0, 3, 1, 2)) else ''
    return ''


def _look_at(name: str, watched: _Watch, blocks: set[str], sizes: list[Size]) -> tuple[Found, list[Layout]]:
    """The layouts that explain the shapes of all runs, the most likely first."""
    parent = watched.parents[name]
    found = Found(name, parent, in_block=parent in blocks)
    calls = [watched.shapes[size].get(name, []) for size in sizes]
    shapes = [tuple(s) for s in zip(*map(set, calls), strict=False)] if all(len(set(c)) == 1 for c in calls) else []
    given = _shape(calls[0][0]) if calls[0] else ''
    if not all(calls):
        found.why = 'is not called'
    elif not shapes:
        found.why = f'takes inputs of several shapes in one run, {" and ".join(map(_shape, sorted(set(calls[0]))))}'
    elif any(shape[0] != BATCH for shape in shapes[0]):
        found.why = f'is given {given} for {BATCH} images: windows, or another grouping, in the place of the batch'
    elif len(calls[0][0]) not in (3, 4):
        found.why = f'is given {given}: no tokens on a grid'
    elif not (form := watched.form[name]):
        found.why = f'does not normalise the channels of {given} as LayerNorm does'
    elif not (layouts := _layouts(form, shapes[0], tuple(sizes))):
        found.why = f'is given {given}, which follows no grid of the image'
    else:
        return found, layouts
    return found, []


@cache
def _layouts(form: str, shapes: Sequence[tuple[int, ...]], sizes: tuple[Size, ...]) -> list[Layout]:
    axes = sorted((TokenAxis(a, s) for s in STRIDES for a in range(-2 * s, 2 * s + 1)), key=_likeliness)
    if form != 'B x T x C':
        at = 1 if form == 'B x H x W x C' else 2
        sides = [shape[at : at + 2] for shape in shapes]
        both = list(zip(sizes, sides, strict=True))
        fits = [[axis for axis in axes if all(axis.tokens(size[i]) == side[i] for size, side in both)] for i in (0, 1)]
        common = [axis for axis in fits[0] if axis in fits[1]]
        fits = [common, common] if common else fits
        return [Layout(form, fits[0][0], fits[1][0])] if all(fits) else []
    numbers = [shape[1] for shape in shapes]
    rounded = [axis for axis in axes if axis.shift in (0, axis.stride - 1)]
    found: dict[tuple[Size, int], Layout] = {}
    for rows, columns in [*((axis, axis) for axis in axes), *product(rounded, rounded)]:
        prefixes = {T - rows.tokens(h) * columns.tokens(w) for T, (h, w) in zip(numbers, sizes, strict=True)}
        layout = Layout(form, rows, columns, prefix := prefixes.pop())
        if not prefixes and 0 <= prefix <= MANY_PREFIX_TOKENS and all(min(layout.grid(size)) > 1 for size in sizes):
            found.setdefault((layout.grid(sizes[0]), prefix), layout)
            if rows == columns:
                continue
        if found and rows != columns:
            break
    return sorted(found.values(), key=lambda layout: layout.prefix)[:4]


def _likeliness(axis: TokenAxis) -> tuple[bool, int, int, int]:
    """Most strides are powers of two, and round down, or up as those of padded convolutions do."""
    rounding = 0 if axis.shift == 0 else 1 if axis.shift == axis.stride - 1 else 2
    return axis.stride.bit_count() != 1, rounding, abs(axis.shift), axis.stride


def _prove_order(
    model: nn.Module,
    norms: dict[str, nn.LayerNorm],
    found: list[tuple[Found, list[Layout]]],
    images: Tensor,
    seed: int,
) -> None:
    """Keeps of each norm's layouts the first in which the image moves a token most from where the token lies.

    A backward pass for each norm through all that is before it would take long. So it leads back to the last block's
    norm whose layout is known, and to the image only where that shows nothing. Where random weights let distant tokens
    count for more, other weights may do better: norms that are found out already are left as they are.
    """
    size = (images.shape[2], images.shape[3])
    layouts = {f.name: (f, [f.layout] if f.layout else possible) for f, possible in found if possible}
    generator = torch.Generator().manual_seed(seed)
    taken: dict[str, tuple[Tensor, list[Tensor]]] = {}  # by norm: its input, and of each layout a sum over tokens

    def take(name: str, norm: Any, args: tuple, kwargs: dict) -> None:
        x = args[0] if args else next(iter(kwargs.values()))
        if name in taken:
            return
        direction = torch.randn(norm.normalized_shape, generator=generator).to(x)
        maps = [layout.on_grid(x, layout.grid(size)) for layout in layouts[name][1]]
        tokens = [[m[i, y, w] for i, (y, w) in enumerate(_places(m.shape[1], m.shape[2]))] for m in maps]
        taken[name] = x, [(torch.stack(some) * direction).sum() for some in tokens]

    with ExitStack() as stack:
        for name in layouts:
            stack.enter_context(norms[name].register_forward_pre_hook(partial(take, name), with_kwargs=True))
        with torch.enable_grad():
            images.requires_grad_()
            _call(model, _nearsighted(model, generator), (images,), {})
    of_image = Layout('B x C x H x W', TokenAxis(0, 1), TokenAxis(0, 1))
    last = None
    for name, (x, projections) in taken.items():
        this, possible = layouts[name]
        if this.layout is not None:
            last = (x, this.layout) if this.in_block else last
            continue
        for layout, projection in zip(possible, projections, strict=True):
            this.grid = layout.grid(size)
            wrong = '' if last is None else _first_misplaced(projection, *last, size, this.grid)
            if last is None or wrong:
                wrong = _first_misplaced(projection, images, of_image, size, this.grid)
            if not wrong:
                this.layout, this.why = layout, ''
                last = (x, layout) if this.in_block else last
                break
            this.why = this.why or wrong


def _nearsighted(model: nn.Module, generator: torch.Generator) -> dict[str, Tensor]:
    """Random weights that leave a token close to its place, as trained ones need not: order is a matter of the code."""
    out = {}
    for name, p in model.named_parameters():
        if p.dim() >= 2:
            out[name] = torch.empty(p.shape).normal_(0, 0.02, generator=generator).to(p)
        if p.dim() == 4 and p.shape[2] % 2 == p.shape[3] % 2 == 1:  # a convolution whose kernel has a centre
            out[name][:, :, p.shape[2] // 2, p.shape[3] // 2] *= 50
    return out


def _places(height: int, width: int) -> list[tuple[int, int]]:
    return [(int(y * height), int(x * width)) for y, x in PLACES]


def _first_misplaced(projection: Tensor, source: Tensor, layout: Layout, size: Size, grid: Size) -> str:
    """A sentence about the first token that comes from elsewhere; nothing if there is none."""
    gradient = None
    if projection.requires_grad:
        (gradient,) = torch.autograd.grad(projection, source, retain_graph=True, allow_unused=True)
    if gradient is None or not gradient.any():
        return 'has no gradient with respect to the image, which would prove where its tokens lie'
    moved = layout.on_grid(gradient.float() / gradient.abs().max().float(), layout.grid(size))
    weight = F.adaptive_avg_pool2d(moved.square().sum(-1), grid)
    for place, largest in zip(_places(*grid), weight.flatten(1).argmax(1).tolist(), strict=True):
        row, column = divmod(largest, grid[1])
        if max(abs(row - place[0]), abs(column - place[1])) > 1:
            return (
                f'has {grid[0]} x {grid[1]} tokens in another order than row by row: the one at {place} is made of the '
                f'image around {(row, column)}'
            )
    return ''


def _shape(shape: Sequence[int]) -> str:
    return ' x '.join(map(str, shape))
