"""Attention weights and mean attention distances of a backbone's blocks."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from mmdtn.backbones import layers, levit
from mmdtn.backbones.swin import WindowAttention

from .capture import BlockTokens

QUERIES = 512  # number of queries whose attention weights are in memory at a time


class AttentionWeights(NamedTuple):
    """Attention weights of one image, for ``G`` groups, ``K`` heads, ``n`` queries and ``m`` keys.

    Window attention has one group for each window, and all other attention has one group. Positions are ``(y, x)`` in
    tokens. Padding tokens count as keys because the model attends to them, but they do not count as queries.
    """

    weights: Tensor  # G x K x n x m
    queries: Tensor  # G x n x 2
    keys: Tensor  # G x m x 2
    allowed: Tensor  # G x n x m; False where attention is masked
    inside: Tensor  # G x n; False for padding


class AttentionDistance(NamedTuple):
    by_head: Tensor  # K
    uniform: float  # the distance if every query attended to all of its keys equally


@torch.no_grad()
def attention_distance(seen: BlockTokens, image: int = 0) -> AttentionDistance:
    """Computes the mean attention distance of each head for one image of the batch.

    The distance of a head, in tokens, is the mean of ``sum_j A[i, j] * dist(i, j)`` over all tokens ``i``. A class
    token has no position, so it is left out as a query and as a key. The remaining weights are scaled to sum to 1.
    """
    total: Any = 0.0
    uniform, queries = 0.0, 0
    for part in attention(seen, image):
        distance = torch.cdist(part.queries.float(), part.keys.float())
        distance = distance * part.inside[..., None]
        total = total + torch.einsum('gknm,gnm->k', part.weights, distance).double()
        among = part.allowed / part.allowed.sum(-1, keepdim=True)
        uniform += float((among * distance).sum())
        queries += int(part.inside.sum())
    return AttentionDistance(total / queries, uniform / queries)


def attention(seen: BlockTokens, image: int = 0) -> Iterator[AttentionWeights]:
    """Yields the attention weights of a block in chunks of queries."""
    module: Any = seen.block.attn
    x = seen.after['norm1'][image : image + 1]
    with torch.no_grad(), _Record() as record:
        module(x)
    if isinstance(module, WindowAttention):
        yield from _of_windows(module, record, seen.grid)
    elif isinstance(module, (layers.Attention, levit.LeViTAttention, levit.ShrinkingAttention)):
        yield from _of_whole_map(module, record, seen)
    else:
        raise TypeError(
            f'{seen.name}: attention distances of {type(module).__name__} are not supported. Use the attention layers '
            'of mmdtn.backbones.'
        )


def class_token_attention(seen: BlockTokens, image: int = 0) -> Tensor:
    """Returns the ``K x h x w`` weights with which the class token attends to the tokens of the grid.

    The weight of the class token itself is left out, so the sum over the map of a head is less than 1.
    """
    if not seen.has_class_token:
        raise ValueError(
            f'{seen.name} has no class token. Choose a block after the one where the class token is added.'
        )
    module: Any = seen.block.attn
    with torch.no_grad(), _Record() as record:
        module(seen.after['norm1'][image : image + 1])
    return record.rows(0, 1)[0, :, 0, 1:].unflatten(-1, seen.grid)


class _Record(TorchFunctionMode):
    """Records the queries and keys of an attention module, or its attention weights if it calls softmax itself.

    Recording avoids a second implementation of each module's projections.
    """

    query: Tensor
    key: Tensor
    mask: Tensor | None = None
    weights: Tensor | None = None

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        if function is F.scaled_dot_product_attention:
            self.query, self.key = args[:2]
            self.mask = kwargs.get('attn_mask')
        elif function is Tensor.softmax:
            self.weights = result
        return result

    def rows(self, start: int, stop: int | None) -> Tensor:
        """Returns the attention weights of queries ``start`` to ``stop``."""
        if self.weights is not None:
            return self.weights[..., start:stop, :]
        scores = self.query[..., start:stop, :] @ self.key.mT * self.query.shape[-1] ** -0.5
        return (scores if self.mask is None else scores + self.mask[..., start:stop, :]).softmax(-1)


def _of_whole_map(module: nn.Module, record: _Record, seen: BlockTokens) -> Iterator[AttentionWeights]:
    height, width = seen.grid
    queries = keys = places(height, width)
    first = 0
    if seen.has_class_token:
        first = 1
    elif isinstance(module, levit.ShrinkingAttention):
        queries = places(*module.shrunk) * module.stride
    elif isinstance(module, layers.Attention) and (side := module.sr_ratio) > 1:
        # Each key represents a square of tokens; its position is the centre of this square.
        keys = places(max(height // side, 1), max(width // side, 1)) * side + (side - 1) / 2
    for start in range(0, len(queries), QUERIES):
        some = queries[None, start : start + QUERIES]
        weights = record.rows(first + start, first + start + some.shape[1])[..., first:]
        allowed = torch.ones(1, some.shape[1], len(keys), dtype=torch.bool)
        inside = torch.ones(1, some.shape[1], dtype=torch.bool)
        yield AttentionWeights(weights / weights.sum(-1, keepdim=True), some, keys[None], allowed, inside)


def _of_windows(module: WindowAttention, record: _Record, grid: tuple[int, int]) -> Iterator[AttentionWeights]:
    height, width = grid
    side, tokens = module.side, module.side**2
    rows, columns = -(-height // side), -(-width // side)
    shift = module.shift if module.shift_alone or min(height, width) > side else 0
    place = places(rows * side, columns * side).view(rows * side, columns * side, 2).roll((-shift, -shift), (0, 1))
    place = place.view(rows, side, columns, side, 2).transpose(1, 2).reshape(-1, tokens, 2)
    # The shift moves the first rows and columns to the end of the map, where they share windows with the last ones.
    # Attention between tokens from different ends of the map is masked.
    wrapped = place < shift
    allowed = (wrapped[:, :, None] == wrapped[:, None]).all(-1)
    inside = (place[..., 0] < height) & (place[..., 1] < width)
    weights = record.rows(0, None).reshape(len(place), module.num_heads, tokens, tokens)
    yield AttentionWeights(weights, place, place, allowed, inside)


def places(height: int, width: int) -> Tensor:
    """Returns the ``(y, x)`` positions of a grid's tokens, row by row, as a ``T x 2`` tensor."""
    y, x = torch.meshgrid(torch.arange(float(height)), torch.arange(float(width)), indexing='ij')
    return torch.stack((y.flatten(), x.flatten()), -1)
