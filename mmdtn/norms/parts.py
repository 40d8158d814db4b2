"""Tokens in parts that a processor's cache holds: most of the time, eager code on CPUs waits for memory."""

from collections.abc import Iterator
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

BYTES = 2**21  # of the tokens of a part, for each thread: with less, calls take longer than the waiting did


def in_parts(spare: list[Tensor], tokens: Tensor, *maps: Tensor | None) -> Iterator[tuple[Any, ...]]:
    """Some rows of cells at a time, of tokens ``B x h x s x w x s x K x c`` and of maps, ``B x h x ...`` or None.

    What ``spare_memory`` gave follows, as long as the part. Parts have one dimension for images and rows; where they
    would gain nothing, all tensors come as they are.
    """
    step = _rows_of_a_part(tokens)
    if step is None:
        yield tokens, *maps, *spare
        return
    parts = [repeat(None) if t is None else t.view(-1, *t.shape[2:]).split(step) for t in (tokens, *maps)]
    for part in zip(*parts, strict=False):  # repeat has no end
        rows = part[0].shape[0]
        yield *part, *(t if rows == step else t[:rows] for t in spare)


def spare_memory(tokens: Tensor, number: int) -> list[Tensor]:
    """As large as a part of the tokens, for one part after the other: it stays in the cache."""
    step = _rows_of_a_part(tokens)
    shape = tokens.shape if step is None else (step, *tokens.shape[2:])
    return [tokens.new_empty(shape, dtype=statistics_dtype(tokens)) for _ in range(number)]


def statistics_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _rows_of_a_part(tokens: Tensor) -> int | None:
    if tokens.device.type != 'cpu' or tokens.shape[2] == 1:  # P mixes single tokens in another layout
        return None
    row = tokens.shape[2:].numel() * statistics_dtype(tokens).itemsize
    step = max(1, BYTES * torch.get_num_threads() // row)
    return step if step < len(tokens) * tokens.shape[1] else None
