"""Generates the ListOps data of Long-Range Arena (LRA): python tools/dataset_converters/make_listops.py [DIRECTORY]

The tool writes basic_train.tsv, basic_val.tsv and basic_test.tsv. If DIRECTORY already contains these files, for
example LRA's own, the tool leaves them unchanged. The tool checks the value of every expression, and prints a summary
of each file.
"""

import argparse
from itertools import islice
from pathlib import Path
from random import Random

import numpy as np
from tqdm import tqdm

from mmdtn.errors import UserError, readable_errors
from mmdtn.sequences.listops import LRA, Limits, draw_distinct, evaluate, read_tsv, write_tsv

SPLITS = ('train', 'val', 'test')


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        'directory', nargs='?', type=Path, default=Path('data/listops'), help='folder of the files (%(default)s)'
    )
    parser.add_argument('--train', type=int, default=96_000, help='number of training expressions (%(default)s)')
    parser.add_argument('--val', type=int, default=2000, help='number of validation expressions (%(default)s)')
    parser.add_argument('--test', type=int, default=2000, help='number of test expressions (%(default)s)')
    parser.add_argument(
        '--min-length', type=int, default=LRA.min_length, help='expressions have more words than this (%(default)s)'
    )
    parser.add_argument(
        '--max-length', type=int, default=LRA.max_length, help='expressions have fewer words than this (%(default)s)'
    )
    parser.add_argument(
        '--max-depth', type=int, default=LRA.max_depth, help='maximum number of levels of an expression (%(default)s)'
    )
    parser.add_argument(
        '--max-args', type=int, default=LRA.max_args, help='maximum number of arguments of an operator (%(default)s)'
    )
    parser.add_argument('--seed', type=int, default=0, help='the same seed generates identical files (%(default)s)')
    parser.add_argument('--debug', action='store_true', help='show the traceback of every error')
    return parser.parse_args(arguments)


def summarise(path: Path) -> str:
    """Checks the value of each expression in a file, and returns a summary of the file."""
    lengths, values = [], []
    for number, (words, target) in enumerate(read_tsv(path), 1):
        try:
            value = evaluate(words)
        except ValueError as error:
            raise UserError(f'{path}, expression {number}: {error}') from None
        if value != target:
            raise UserError(f'{path}, expression {number}: the value is {value}, but the file has {target}.')
        lengths.append(len(words))
        values.append(value)
    if not values:
        raise UserError(f'{path} has no expressions, only the header. Delete the file, or replace it.')
    counts = np.bincount(values, minlength=10)
    return (
        f'{path}: {len(values):,} expressions with {min(lengths)} to {max(lengths)} words, {np.mean(lengths):.0f} on '
        f'average. The most frequent value is {counts.argmax()}, in {counts.max() / len(values):.1%} of them.'
    )


def run(args: argparse.Namespace) -> None:
    limits = Limits(args.max_depth, args.max_args, args.min_length, args.max_length)
    if limits.max_args < 2 or limits.max_length - limits.min_length < 2 or limits.max_depth < 2:
        raise UserError(
            f'No expression fits {limits}. --max-depth and --max-args should be at least 2, and --max-length at least '
            '2 greater than --min-length.'
        )
    paths = {split: args.directory / f'basic_{split}.tsv' for split in SPLITS}
    there = [path for path in paths.values() if path.exists()]
    if not there:
        expressions = draw_distinct(Random(args.seed), limits)
        for split, path in paths.items():
            size = getattr(args, split)
            write_tsv(path, tqdm(islice(expressions, size), split, size))
    elif len(there) < len(paths):
        missing = ', '.join(str(path) for path in paths.values() if path not in there)
        raise UserError(
            f'{missing} is missing. Add the missing files, or delete {", ".join(map(str, there))} to generate all.'
        )
    for path in paths.values():
        print(summarise(path), flush=True)


def main(arguments: list[str] | None = None) -> None:
    args = parse_args(arguments)
    with readable_errors(args.debug):
        run(args)


if __name__ == '__main__':
    main()
