"""Padded batches of sequences of unequal length: norms work on the real tokens, and never read the padding."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Lengths = Sequence[int] | Tensor  # real tokens of each sequence, which are its first
Groups = list[tuple[int, int]]  # how many sequences have a length, and the length


class RealTokens:
    """The real tokens of ``x``, ``B x T x C``, as ``N x C``. Sequences of equal length follow one another.

    Indices come from ``lengths`` on the CPU, so that a GPU does not have to wait for a count of tokens.
    """

    def __init__(self, x: Tensor, lengths: Lengths) -> None:
        if x.dim() != 3:
            raise ValueError(f'lengths are for sequences B x T x C, but got {" x ".join(map(str, x.shape))}.')
        self.shape = B, T, _ = x.shape
        counts = torch.as_tensor(lengths).cpu()
        if counts.shape != (B,) or counts.is_floating_point() or not bool(((counts > 0) & (counts <= T)).all()):
            raise ValueError(
                f'lengths={lengths!r}: {B} sequences of up to {T} tokens need {B} whole numbers from 1 to {T}.'
            )
        order = counts.argsort(stable=True)
        found, times = counts[order].unique_consecutive(return_counts=True)
        self.groups: Groups = list(zip(times.tolist(), found.tolist(), strict=True))
        place = torch.arange(T)
        places = order[:, None] * T + place
        self.index = places[place < counts[order, None]].to(x.device, non_blocking=True)
        self.tokens = x.flatten(0, 1).index_select(0, self.index)

    def put_back(self, tokens: Tensor) -> Tensor:
        """``N x C`` to ``B x T x C``. Padding is 0."""
        B, T, C = self.shape
        return tokens.new_zeros(B * T, C).index_copy(0, self.index, tokens).view(B, T, C)


def by_length(tokens: Tensor, groups: Groups) -> list[Tensor]:
    """``N x C`` to ``k x n x C`` for each length n and the k sequences that have it."""
    parts = tokens.split([k * n for k, n in groups])
    return [part.unflatten(0, group) for part, group in zip(parts, groups, strict=True)]


def for_each_length(normalise: Callable[[Tensor], Tensor], tokens: Tensor, groups: Groups) -> Tensor:
    """``normalise`` of ``k x n x C`` for each length, put together as ``N x C``."""
    return torch.cat([normalise(part).flatten(0, 1) for part in by_length(tokens, groups)])
