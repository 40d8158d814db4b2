"""Layouts of tokens on the grid of an image, and the search for layouts that explain the shapes of a model's tokens."""

from collections.abc import Sequence
from functools import cache
from itertools import product
from typing import NamedTuple

from mmdtn.norms.dtn import MANY_PREFIX_TOKENS

Size = tuple[int, int]  # height, width
STRIDES = range(1, 65)


class TokenAxis(NamedTuple):
    """Rule for the number of tokens along one side of an image: ``(side + shift) // stride``."""

    shift: int
    stride: int

    def tokens(self, side: int) -> int:
        return (side + self.shift) // self.stride


class Layout(NamedTuple):
    """Describes where the tokens of an input lie in the image."""

    form: str  # 'B x H x W x C', 'B x C x H x W' or 'B x T x C'
    rows: TokenAxis
    columns: TokenAxis
    prefix: int = 0  # number of tokens in front of the grid

    def grid(self, size: Size) -> Size:
        return self.rows.tokens(size[0]), self.columns.tokens(size[1])


@cache
def fitting_layouts(form: str, shapes: Sequence[tuple[int, ...]], sizes: tuple[Size, ...]) -> list[Layout]:
    """Returns up to four layouts that give tokens of ``shapes`` for images of ``sizes``, starting with the most likely.

    Each shape belongs to the size at the same position.
    """
    several = len(sizes) > 1
    axes = [TokenAxis(a, s) for s in STRIDES for a in range(-2 * s, 2 * s + 1)]
    axes.sort(key=lambda axis: _unlikeliness(axis, several))
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


def _unlikeliness(axis: TokenAxis, several_sizes: bool) -> tuple:
    """Returns a sort key that puts likely combinations of shift and stride first.

    Most strides are powers of two. Most layers round down, or round up as padded convolutions do. With a single image
    size, a stride that divides the size is more likely than a power of two.
    """
    odd = axis.stride.bit_count() != 1
    rounding = 0 if axis.shift == 0 else 1 if axis.shift == axis.stride - 1 else 2
    return (*((odd, rounding) if several_sizes else (rounding, odd)), abs(axis.shift), axis.stride)


def by(size: Size) -> str:
    """Formats a size as ``height x width`` for messages."""
    return f'{size[0]} x {size[1]}'
