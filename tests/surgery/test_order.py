"""Checks that norms are converted if their tokens are in row-by-row order, and only then."""

import pytest
import torch
from torch import nn

from mmdtn import convert_norms


def flat(grid):
    return grid.flatten(1, 2)


def permuted(order):
    """Sorts tokens by the key ``order(row, column, height, width)``."""

    def apply(grid, extra):
        height, width = grid.shape[1:3]
        places = sorted((order(y, x, height, width), y * width + x) for y in range(height) for x in range(width))
        return flat(grid)[:, [index for _, index in places]]

    return apply


def hilbert(y, x, height, width):
    """Returns the position of a cell on the Hilbert curve through the smallest square of side 2^k around the grid."""
    side = 1 << (max(height, width) - 1).bit_length()
    place, half = 0, side // 2
    while half:
        right, below = int(x & half > 0), int(y & half > 0)
        place += half * half * ((3 * right) ^ below)
        if not below:
            if right:
                x, y = side - 1 - x, side - 1 - y
            x, y = y, x
        half //= 2
    return place


def windows(grid, extra):
    b, h, w, c = grid.shape
    return grid.view(b, h // 4, 4, w // 4, 4, c).transpose(2, 3).reshape(b, h * w, c)


def put(where, number):
    """Inserts ``number`` other tokens at the fraction ``where`` of the sequence."""

    def apply(grid, extra):
        tokens = flat(grid)
        at = round(where * tokens.shape[1])
        return torch.cat([tokens[:, :at], extra[:, :number].expand(len(tokens), -1, -1), tokens[:, at:]], 1)

    return apply


RIGHT = {
    'row by row': lambda grid, extra: flat(grid),
    'class token in front': put(0, 1),
    'registers in front': put(0, 5),
}
WRONG = {
    'class token in the middle': put(0.5, 1),
    'class token behind the first row': put(1 / 8, 1),
    'class token at the end': put(1, 1),
    'registers in the middle': put(0.5, 4),
    'registers at the end': put(1, 4),
    'rolled by one': lambda grid, extra: flat(grid).roll(1, 1),
    'rolled back by one': lambda grid, extra: flat(grid).roll(-1, 1),
    'rolled by a row': lambda grid, extra: grid.roll(1, 1).flatten(1, 2),
    'rolled by a column': lambda grid, extra: grid.roll(1, 2).flatten(1, 2),
    'transposed': lambda grid, extra: flat(grid.transpose(1, 2)),
    'rows from below': lambda grid, extra: flat(grid.flip(1)),
    'reversed': lambda grid, extra: flat(grid).flip(1),
    'two tokens exchanged': lambda grid, extra: flat(grid)[:, [0, 1, 3, 2, *range(4, grid[0, :, :, 0].numel())]],
    'snake': permuted(lambda y, x, h, w: (y, x if y % 2 == 0 else -x)),
    'hilbert': permuted(hilbert),
    'windows unrolled': windows,
    'two images side by side': lambda grid, extra: torch.cat([grid, grid], 2).flatten(1, 2),
    'image beside its mirror image': lambda grid, extra: torch.cat([grid, grid.flip(2)], 2).flatten(1, 2),
    'two images one below the other': lambda grid, extra: torch.cat([grid, grid], 1).flatten(1, 2),
    'both directions, one behind the other': lambda grid, extra: torch.cat([flat(grid), flat(grid).flip(1)], 1),
    'both directions, added': lambda grid, extra: flat(grid) + flat(grid).flip(1),
    'both directions, side by side': lambda grid, extra: torch.cat([grid, grid.flip(1, 2)], 3).flatten(1, 2),
}
EMBED = [
    lambda: nn.Conv2d(3, 16, 8, 8),
    lambda: nn.Conv2d(3, 16, 15, 8, 7),  # patches that overlap
    lambda: nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.GELU(), nn.Conv2d(16, 16, 4, 4)),
]


class Block(nn.Module):
    def __init__(self, channels, post_norm):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(channels), nn.LayerNorm(channels)
        self.attn = nn.MultiheadAttention(channels, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(channels, 32), nn.GELU(), nn.Linear(32, channels))
        self.post_norm = post_norm

    def forward(self, x):
        if self.post_norm:
            x = x + self.norm1(self.attn(x, x, x, need_weights=False)[0])
            return x + self.norm2(self.mlp(x))
        y = self.norm1(x)
        x = x + self.attn(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    """Transformer whose tokens are in the given order."""

    def __init__(self, order, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = EMBED[seed % 3]()
        self.order = order
        self.extra = nn.Parameter(torch.randn(1, 5, 16))
        channels = order(torch.zeros(1, 8, 8, 16), self.extra).shape[2]
        self.blocks = nn.ModuleList(Block(channels, post_norm=seed % 2 == 1) for _ in range(3))

    def forward(self, images):
        x = self.order(self.embed(images).permute(0, 2, 3, 1), self.extra)
        for block in self.blocks:
            x = block(x)
        return x.mean(1)


@pytest.mark.parametrize('seed', range(4))
@pytest.mark.parametrize('name', RIGHT)
def test_tokens_that_lie_row_by_row_are_converted(name, seed):
    report = convert_norms(Model(RIGHT[name], seed), (64, 64))
    assert len(report.converted) == 6 and len(report.sizes) == 3, report.details()


@pytest.mark.parametrize('seed', range(4))
@pytest.mark.parametrize('name', WRONG)
def test_tokens_in_any_other_order_are_refused(name, seed):
    report = convert_norms(Model(WRONG[name], seed), (64, 64))
    assert report.converted == {} and report.left_in_blocks == 6, report.details()
