"""Generates, reads and evaluates ListOps expressions (Nangia and Bowman, 2018) as in Long-Range Arena (LRA)."""

import csv
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import ClassVar, NamedTuple

import numpy as np
from mmengine.dataset import BaseDataset
from mmengine.registry import DATASETS

from mmdtn.errors import UserError
from mmdtn.files import whole_file


def median(values: Sequence[int]) -> int:
    """Returns the median. For an even number of values, rounds down the mean of the two middle values."""
    ordered = sorted(values)
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) // 2


OPERATORS: dict[str, Callable[[Sequence[int]], int]] = {
    '[MIN': min,
    '[MAX': max,
    '[MED': median,
    '[SM': lambda values: sum(values) % 10,
}
END = ']'
DIGITS = tuple('0123456789')
WORDS = (*OPERATORS, END, *DIGITS)
PADDING, UNKNOWN = 0, len(WORDS) + 1
IDS = {word: number for number, word in enumerate(WORDS, 1)}
VOCABULARY_SIZE = len(WORDS) + 2
OPERATOR_SHARE = 0.25
HEADER = ['Source', 'Target']
BINARY_PARENTHESES = str.maketrans('()', '  ')  # LRA's files put each pair of subtrees in parentheses


class Limits(NamedTuple):
    """Size limits of expressions. Lengths are greater than ``min_length`` and less than ``max_length``."""

    max_depth: int = 10
    max_args: int = 10
    min_length: int = 500
    max_length: int = 2000


LRA = Limits()


def draw(rng: Random, limits: Limits = LRA) -> list[str]:
    """Returns a random expression of any length as a list of words."""
    words: list[str] = []
    _draw(rng, 1, limits.max_depth, limits.max_args, words)
    return words


def _draw(rng: Random, depth: int, max_depth: int, max_args: int, words: list[str]) -> None:
    if depth >= max_depth or rng.random() >= OPERATOR_SHARE:
        words.append(DIGITS[int(10 * rng.random())])  # several times faster than rng.choice
        return
    words.append(WORDS[int(len(OPERATORS) * rng.random())])
    for _ in range(2 + int((max_args - 1) * rng.random())):
        _draw(rng, depth + 1, max_depth, max_args, words)
    words.append(END)


def draw_distinct(rng: Random, limits: Limits = LRA) -> Iterator[list[str]]:
    """Yields random expressions within the limits, endlessly and without duplicates."""
    seen = set()
    while True:
        words = draw(rng, limits)
        if limits.min_length < len(words) < limits.max_length:
            digest = hashlib.blake2b(' '.join(words).encode(), digest_size=16).digest()
            if digest not in seen:
                seen.add(digest)
                yield words


def evaluate(words: Iterable[str]) -> int:
    """Computes the value of an expression.

    Example:
        >>> evaluate('[SM 7 8 [MED 1 9 4 6 ] ]'.split())
        0
    """
    arguments: list[list[int]] = [[]]
    operators = []
    for word in words:
        if word in OPERATORS:
            operators.append(OPERATORS[word])
            arguments.append([])
        elif word == END:
            if not operators or not arguments[-1]:
                raise ValueError(f'{END!r} needs an open operator with at least one argument before it.')
            values = arguments.pop()
            arguments[-1].append(operators.pop()(values))
        elif word in DIGITS:
            arguments[-1].append(int(word))
        else:
            raise ValueError(f'{word!r} is not a word of ListOps. The words are {" ".join(WORDS)}.')
    if operators or len(arguments[0]) != 1:
        raise ValueError(
            f'An expression needs exactly one value, and {END!r} for each operator, but {len(operators)} operators are '
            f'not closed, and {len(arguments[0])} values are outside all operators.'
        )
    return arguments[0][0]


def encode(words: Sequence[str]) -> np.ndarray:
    """Returns the token id of each word."""
    return np.array([IDS.get(word, UNKNOWN) for word in words], dtype=np.uint8)


def write_tsv(path: str | Path, expressions: Iterable[Sequence[str]]) -> None:
    """Writes expressions and their values to a TSV file, omitting the parentheses found in LRA's files.

    If writing fails, no partial file is left behind.
    """
    with whole_file(path) as file:
        file.write('\t'.join(HEADER).encode() + b'\n')
        for words in expressions:
            file.write(f'{" ".join(words)}\t{evaluate(words)}\n'.encode())


def read_tsv(path: str | Path) -> Iterator[tuple[list[str], int]]:
    """Yields the words and the value of each expression in a TSV file from LRA or from ``make_listops.py``."""
    with open(path, newline='') as file:
        rows = csv.reader(file, delimiter='\t')
        if next(rows, None) != HEADER:
            raise UserError(
                f'{path} is not a ListOps file. The first line should be {" and ".join(HEADER)}, separated by a tab.'
            )
        for row in rows:
            try:
                source, target = row
                value = int(target)
            except ValueError:
                raise UserError(
                    f'{path}, line {rows.line_num} should have an expression, a tab and a number.'
                ) from None
            yield source.translate(BINARY_PARENTHESES).split(), value


@DATASETS.register_module()
class ListOps(BaseDataset):
    """Dataset of ListOps expressions in a TSV file from LRA or from ``tools/dataset_converters/make_listops.py``.

    In each sample, ``tokens`` contains the token ids of an expression, and ``gt_label`` is its value.

    Example:
        dataset = dict(type='ListOps', data_root='data/listops', ann_file='basic_train.tsv')
    """

    METAINFO: ClassVar[dict] = dict(classes=DIGITS)

    def load_data_list(self) -> list[dict]:
        if not os.path.exists(self.ann_file):
            raise UserError(
                f'{self.ann_file} does not exist. Generate it with `python tools/dataset_converters/make_listops.py '
                f'{os.path.dirname(self.ann_file) or "."}`, or copy the file of LRA to this path.'
            )
        return [dict(tokens=encode(words), gt_label=value) for words, value in read_tsv(self.ann_file)]
