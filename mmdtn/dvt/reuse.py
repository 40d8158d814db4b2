"""Modules that reuse the tokens of the previous exit's last block, and the attention logits of all its blocks."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from timm.layers import Mlp
from torch import Tensor, nn

Grid = tuple[int, int]
HIDDEN, EMBEDDED = 128, 48  # hidden and output channels of the MLP that computes features


class Upstream(NamedTuple):
    """An exit's output that the next exit reuses.

    Args:
        tokens: Tokens ``B x M x D`` before the final norm, with the class token first.
        grid: Height and width of the grid of the other M - 1 tokens.
        relations: Attention logits ``B x L H x M x M`` of L blocks with H heads, including added logits.
    """

    tokens: Tensor
    grid: Grid
    relations: Tensor | None

    def of(self, images: Tensor) -> 'Upstream':
        """Selects some images of the batch by their indices."""
        return Upstream(self.tokens[images], self.grid, None if self.relations is None else self.relations[images])


def resample(x: Tensor, source: Grid, target: Grid) -> Tensor:
    """Resamples maps from one grid to another. The last dimension holds a flattened map.

    Nearest-neighbour interpolation first doubles the sides, and average pooling then yields the target grid.
    """
    maps = F.interpolate(x.reshape(1, -1, *source), scale_factor=2.0)
    return F.adaptive_avg_pool2d(maps, target).reshape(*x.shape[:-1], -1)


def resample_relations(x: Tensor, source: Grid, target: Grid) -> Tensor:
    """Resamples both token dimensions of attention logits, from ``M x M`` to ``(N + 1) x (N + 1)``.

    The row and the column of the class token are not resampled.
    """
    for _ in range(2):
        x = torch.cat((x[..., :1], resample(x[..., 1:], source, target)), -1).mT
    return x


class FeatureReuse(nn.Module):
    """Computes the features ``B x (N + 1) x 48`` that a block concatenates to its tokens.

    The formula is ``E = [0 ; resample(g(Z))]``. The features of the class token are zero.
    """

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, eps=eps)
        self.mlp = Mlp(width, HIDDEN, EMBEDDED)

    def forward(self, upstream: Upstream, grid: Grid) -> Tensor:
        features = self.mlp(self.norm(upstream.tokens[:, 1:]))
        return F.pad(resample(features.mT, upstream.grid, grid).mT, (0, 0, 1, 0))


class RelationReuse(nn.Module):
    """Converts the logits of all blocks in the previous exit to the logits that an exit adds to its attention.

    Two 1 x 1 convolutions over blocks and heads transform the logits.
    """

    def __init__(self, depth: int, num_heads: int) -> None:
        super().__init__()
        channels = depth * num_heads
        self.num_heads = num_heads
        self.conv1 = nn.Conv2d(channels, 3 * channels, 1)
        self.conv2 = nn.Conv2d(3 * channels, channels, 1)

    def hidden(self, relations: Tensor) -> Tensor:
        """Applies the first convolution to the logits of all blocks, and returns ``B x 3 L H x M x M``."""
        return F.gelu(self.conv1(relations))

    def added(self, hidden: Tensor, layer: int, source: Grid, target: Grid) -> Tensor:
        """Returns the logits ``B x H x (N + 1) x (N + 1)`` to add in one block.

        Computing one block at a time saves memory, because logits on the finer grid are large.
        """
        heads = slice(layer * self.num_heads, (layer + 1) * self.num_heads)
        assert self.conv2.bias is not None
        mixed = F.conv2d(hidden, self.conv2.weight[heads], self.conv2.bias[heads])
        return resample_relations(mixed, source, target)
