"""Tokens in cells of ``s`` tokens a side, which share the statistics of one neighbourhood.

Pooling makes ``h x w`` cells of an ``H x W`` grid of tokens. Functions without state.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def split(tokens: Tensor, side: int) -> tuple[Tensor, Tensor | None]:
    """``B x H x W x C`` in cells of ``side`` tokens: ``B x h x s x w x s x C``.

    Where ``side`` does not divide the grid, zeros fill the last cells, and a mask ``B x h x s x w x s x 1 x 1`` comes
    along that is 1 for the tokens that are really there.
    """
    batch, height, width, channels = tokens.shape
    h, w = -(-height // side), -(-width // side)
    if height % side == 0 and width % side == 0:
        return tokens.view(batch, h, side, w, side, channels), None
    padding = (0, 0, 0, w * side - width, 0, h * side - height)
    present = F.pad(tokens.new_ones(batch, height, width, 1), padding).view(batch, h, side, w, side, 1, 1)
    return F.pad(tokens, padding).view(batch, h, side, w, side, channels), present


def merge(cells: Tensor, height: int, width: int) -> Tensor:
    """The inverse of ``split``."""
    batch, h, side, w, _, channels = cells.shape
    return cells.view(batch, h * side, w * side, channels)[:, :height, :width]


def sum_of_cells(tokens: Tensor, divisor: int | None = 1, out: Tensor | None = None) -> Tensor:
    """``... x s x w x s x K x c`` to ``... x w x K x c``, over a divisor, None of which is the number of tokens."""
    *rows, side, w, _, K, c = tokens.shape
    if side == 1:
        return tokens.squeeze(-3).squeeze(-4)
    if torch.compiler.is_compiling():
        return tokens.sum((-5, -3)) / (divisor or side**2)
    # Pooling reads channels-last memory once; in eager a sum over two separate dimensions is many times slower.
    image = tokens.view(-1, side, w * side, K * c).permute(0, 3, 1, 2)
    out = image.new_empty(*rows, w, K, c) if out is None else out
    pooled = out.view(-1, 1, w, K * c).permute(0, 3, 1, 2)
    F.avg_pool2d(image, side, divisor_override=divisor, out=pooled)  # type: ignore[call-arg]  # its stub has no out
    return out


def mean_of_cells(tokens: Tensor, present: Tensor | None, out: Tensor | None = None) -> Tensor:
    """The same, over the number of tokens that are really there; those filled in are zero."""
    if present is None:
        return sum_of_cells(tokens, None, out)
    return over_size(sum_of_cells(tokens, 1, out), present, tokens.shape[-3], out)


def over_size(cells: Tensor, present: Tensor | None, side: int, out: Tensor | None = None) -> Tensor:
    """Values of cells over their numbers of tokens."""
    return torch.div(cells, side**2 if present is None else sum_of_cells(present), out=out)


def on_tokens(cells: Tensor) -> Tensor:
    """``... x w x K x c`` so that they broadcast to the tokens of the cells."""
    return cells[..., None, :, None, :, :]


def memory_of_cells(x: Tensor, memory: Tensor) -> Tensor:
    """For values of the cells of ``x``, ``B x h x s x w x s x K x c``: the given memory where a cell is one token."""
    B, h, side, w, _, K, c = x.shape
    return memory.squeeze(4).squeeze(2) if side == 1 else memory.new_empty(B, h, w, K, c)
