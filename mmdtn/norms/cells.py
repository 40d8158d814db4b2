"""Tokens in cells of ``s`` tokens a side, which share the statistics of one neighbourhood.

Pooling makes ``h x w`` cells of an ``H x W`` grid of tokens. Functions without state.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def split(tokens: Tensor, side: int) -> tuple[Tensor, Tensor | None]:
    """``B x H x W x C`` in cells of ``side`` tokens: ``B x h x s x w x s x C``.

    Where ``side`` does not divide the grid, zeros fill the last cells, and a mask ``1 x h x s x w x s x 1`` comes along
    that is 1 for the tokens that are really there.
    """
    batch, height, width, channels = tokens.shape
    h, w = -(-height // side), -(-width // side)
    if height % side == 0 and width % side == 0:
        return tokens.view(batch, h, side, w, side, channels), None
    padding = (0, 0, 0, w * side - width, 0, h * side - height)
    present = F.pad(tokens.new_ones(1, height, width, 1), padding).view(1, h, side, w, side, 1)
    return F.pad(tokens, padding).view(batch, h, side, w, side, channels), present


def merge(cells: Tensor, height: int, width: int) -> Tensor:
    """The inverse of ``split``."""
    batch, h, side, w, _, channels = cells.shape
    return cells.view(batch, h * side, w * side, channels)[:, :height, :width]


def cell_sum(tokens: Tensor) -> Tensor:
    """``B x h x s x w x s x C``, summed over each cell: ``B x h x 1 x w x 1 x C``."""
    batch, h, side, w, _, channels = tokens.shape
    if side == 1:
        return tokens
    if torch.compiler.is_compiling():
        return tokens.sum((2, 4), keepdim=True)
    # Pooling reads channels-last memory once; in eager a sum over two separate dimensions is many times slower.
    image = tokens.view(batch, h * side, w * side, channels).permute(0, 3, 1, 2)
    return F.avg_pool2d(image, side, divisor_override=1).permute(0, 2, 3, 1).view(batch, h, 1, w, 1, channels)
