"""Gathers the real tokens of padded sequences for a norm, and puts them back."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Lengths = Sequence[int] | Tensor  # number of real tokens in each sequence, which come before the padding
Groups = list[tuple[int, int]]  # pairs of a number of sequences and their common length


class RealTokens:
    """Gathers the real tokens of ``x`` from ``B x T x C`` to ``N x C``. Sequences of equal length are adjacent.

    The CPU computes the indices from the lengths, so it knows the number of tokens without waiting for a GPU.
    """

    def __init__(self, x: Tensor, lengths: Lengths) -> None:
        if x.dim() != 3:
            raise ValueError(f'lengths are only for sequences B x T x C, but got {" x ".join(map(str, x.shape))}.')
        self.shape = B, T, _ = x.shape
        counts = torch.as_tensor(lengths).cpu()
        if counts.shape != (B,) or counts.is_floating_point() or not bool(((counts > 0) & (counts <= T)).all()):
            raise ValueError(f'lengths={lengths!r} should be {B} whole numbers from 1 to {T}, one for each sequence.')
        order = counts.argsort(stable=True)
        found, times = counts[order].unique_consecutive(return_counts=True)
        self.groups: Groups = list(zip(times.tolist(), found.tolist(), strict=True))
        place = torch.arange(T)
        places = order[:, None] * T + place
        self.index = places[place < counts[order, None]].to(x.device, non_blocking=True)
        self.tokens = x.flatten(0, 1).index_select(0, self.index)

    def put_back(self, tokens: Tensor) -> Tensor:
        """Converts ``N x C`` back to ``B x T x C``, with zeros as padding."""
        B, T, C = self.shape
        return tokens.new_zeros(B * T, C).index_copy(0, self.index, tokens).view(B, T, C)


def by_length(tokens: Tensor, groups: Groups) -> list[Tensor]:
    """Splits ``N x C`` by length. The k sequences of length n form a tensor ``k x n x C``."""
    parts = tokens.split([k * n for k, n in groups])
    return [part.unflatten(0, group) for part, group in zip(parts, groups, strict=True)]


def for_each_length(normalise: Callable[[Tensor], Tensor], tokens: Tensor, groups: Groups) -> Tensor:
    """Applies ``normalise`` to the sequences of each length, ``k x n x C``, and returns ``N x C``."""
    return torch.cat([normalise(part).flatten(0, 1) for part in by_length(tokens, groups)])
