"""What the blocks attend to, and how far away that is."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from mmdtn.backbones import layers, levit
from mmdtn.backbones.swin import WindowAttention

from .capture import BlockTokens

QUERIES = 512  # whose attention is held at a time


class AttentionWeights(NamedTuple):
    """Attention of one image in ``G`` groups (windows; 1 for all else), ``K`` heads, from ``n`` queries to ``m`` keys.

    Positions are ``(y, x)`` in tokens. What is not of the image itself, padding, is a key as any other, because the
    model attends to it, but no query.
    """

    weights: Tensor  # G x K x n x m
    queries: Tensor  # G x n x 2
    keys: Tensor  # G x m x 2
    allowed: Tensor  # G x n x m; False where the model never looks
    inside: Tensor  # G x n; False for padding


class AttentionDistance(NamedTuple):
    by_head: Tensor  # K
    uniform: float  # of attention that is the same to all keys that a query has


@torch.no_grad()
def attention_distance(seen: BlockTokens, image: int = 0) -> AttentionDistance:
    """The mean over all tokens i of ``sum_j A[i, j] * dist(i, j)``, in tokens, of one image of the batch.

    The class token has no place: neither it nor what others attend to it counts, and the rest is scaled to sum to 1.
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
    """Attention of a block, in chunks of queries: every query once."""
    module: Any = seen.block.attn
    x = seen.after['norm1'][image : image + 1]
    with torch.no_grad(), _Record() as record:
        module(x)
    if isinstance(module, WindowAttention):
        yield from _of_windows(module, record, seen.grid)
    elif isinstance(module, (layers.Attention, levit.LeViTAttention, levit.ShrinkingAttention)):
        yield from _of_whole_map(module, record, seen)
    else:
        raise TypeError(f'{seen.name}: the places of the keys of {type(module).__name__} are not known here.')


class _Record(TorchFunctionMode):
    """Notes queries and keys, or the weights where the softmax is explicit, of a module as it runs.

    So there is no second copy of the modules' projections to keep in step with the first.
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
        """Weights of some queries."""
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
        # A key stands for a square of tokens, at its centre.
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
    wrapped = place < shift  # from the start of the map to its end: not together with what was there before
    allowed = (wrapped[:, :, None] == wrapped[:, None]).all(-1)
    inside = (place[..., 0] < height) & (place[..., 1] < width)
    weights = record.rows(0, None).reshape(len(place), module.num_heads, tokens, tokens)
    yield AttentionWeights(weights, place, place, allowed, inside)


def places(height: int, width: int) -> Tensor:
    """``(y, x)`` of the tokens of a grid, row by row: ``T x 2``."""
    y, x = torch.meshgrid(torch.arange(float(height)), torch.arange(float(width)), indexing='ij')
    return torch.stack((y.flatten(), x.flatten()), -1)
