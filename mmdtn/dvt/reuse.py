"""What an exit takes from the exit before it: tokens of its last block, and attention logits of all its blocks."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from timm.layers import Mlp
from torch import Tensor, nn

Grid = tuple[int, int]
HIDDEN, EMBEDDED = 128, 48  # channels of the MLP that makes features of tokens


class Upstream(NamedTuple):
    """An exit's end: tokens ``B x M x D`` before its final norm, the class token first, on ``grid``, M - 1 = h w.

    ``relations`` are the attention logits ``B x L H x M x M`` of its L blocks and H heads, with what was added to them.
    """

    tokens: Tensor
    grid: Grid
    relations: Tensor | None

    def of(self, images: Tensor) -> 'Upstream':
        """The same of some images of the batch, by their numbers."""
        return Upstream(self.tokens[images], self.grid, None if self.relations is None else self.relations[images])


def resample(x: Tensor, source: Grid, target: Grid) -> Tensor:
    """Maps in the last dimension, row by row, on another grid: ``... x (s s')`` to ``... x (t t')``.

    Nearest cells on a grid twice as fine, then means of those that a cell of ``target`` meets.
    """
    maps = F.interpolate(x.reshape(1, -1, *source), scale_factor=2.0)
    return F.adaptive_avg_pool2d(maps, target).reshape(*x.shape[:-1], -1)


def resample_relations(x: Tensor, source: Grid, target: Grid) -> Tensor:
    """``T x T^t``: ``... x M x M`` to ``... x (N + 1) x (N + 1)``, columns and rows of image tokens resampled as maps.

    Row and column of the class token stay what they are.
    """
    for _ in range(2):
        x = torch.cat((x[..., :1], resample(x[..., 1:], source, target)), -1).mT
    return x


class FeatureReuse(nn.Module):
    """Features that a block joins to its tokens: ``E = [0 ; resample(g(Z))]``, ``B x (N + 1) x 48``."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, eps=eps)
        self.mlp = Mlp(width, HIDDEN, EMBEDDED)

    def forward(self, upstream: Upstream, grid: Grid) -> Tensor:
        features = self.mlp(self.norm(upstream.tokens[:, 1:]))
        return F.pad(resample(features.mT, upstream.grid, grid).mT, (0, 0, 1, 0))


class RelationReuse(nn.Module):
    """What an exit adds to its attention logits, of all layers upstream: two convolutions over layers and heads."""

    def __init__(self, depth: int, num_heads: int) -> None:
        super().__init__()
        channels = depth * num_heads
        self.num_heads = num_heads
        self.conv1 = nn.Conv2d(channels, 3 * channels, 1)
        self.conv2 = nn.Conv2d(3 * channels, channels, 1)

    def hidden(self, relations: Tensor) -> Tensor:
        """``B x L H x M x M`` to ``B x 3 L H x M x M``, for all layers."""
        return F.gelu(self.conv1(relations))

    def added(self, hidden: Tensor, layer: int, source: Grid, target: Grid) -> Tensor:
        """``B x H x (N + 1) x (N + 1)`` for one layer, so that no more than this is ever held on the finer grid."""
        heads = slice(layer * self.num_heads, (layer + 1) * self.num_heads)
        assert self.conv2.bias is not None
        mixed = F.conv2d(hidden, self.conv2.weight[heads], self.conv2.bias[heads])
        return resample_relations(mixed, source, target)
