"""Makes ListOps as Long-Range Arena (LRA) has it: python tools/dataset_converters/make_listops.py [DIRECTORY]

It writes basic_train.tsv, basic_val.tsv and basic_test.tsv. Files that are in DIRECTORY already, LRA's own for example,
stay as they are: their values are checked. For each file it prints a line.
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
    parser.add_argument('directory', nargs='?', type=Path, default=Path('data/listops'), help='(%(default)s)')
    parser.add_argument('--train', type=int, default=96_000, help='expressions for training (%(default)s)')
    parser.add_argument('--val', type=int, default=2000, help='for validation (%(default)s)')
    parser.add_argument('--test', type=int, default=2000, help='for the test (%(default)s)')
    parser.add_argument('--min-length', type=int, default=LRA.min_length, help='all are longer (%(default)s)')
    parser.add_argument('--max-length', type=int, default=LRA.max_length, help='all are shorter (%(default)s)')
    parser.add_argument('--max-depth', type=int, default=LRA.max_depth, help='levels of a tree (%(default)s)')
    parser.add_argument('--max-args', type=int, default=LRA.max_args, help='arguments of an operator (%(default)s)')
    parser.add_argument('--seed', type=int, default=0, help='same seed, same bytes (%(default)s)')
    parser.add_argument('--debug', action='store_true', help='show the traceback of every error')
    return parser.parse_args(arguments)


def summarise(path: Path) -> str:
    """Checks the value of each expression, and says what a file has."""
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
        raise UserError(f'{path} has no expressions.')
    counts = np.bincount(values, minlength=10)
    return (
        f'{path}: {len(values):,} expressions of {min(lengths)} to {max(lengths)} words, mean {np.mean(lengths):.0f}; '
        f'the most frequent value is {counts.argmax()}, with {counts.max() / len(values):.1%}'
    )


def run(args: argparse.Namespace) -> None:
    limits = Limits(args.max_depth, args.max_args, args.min_length, args.max_length)
    if limits.max_args < 2 or limits.max_length - limits.min_length < 2 or limits.max_depth < 2:
        raise UserError(f'{limits}: no expression fits. Operators have 2 arguments at least, and trees 2 levels.')
    paths = {split: args.directory / f'basic_{split}.tsv' for split in SPLITS}
    there = [path for path in paths.values() if path.exists()]
    if not there:
        expressions = draw_distinct(Random(args.seed), limits)
        for split, path in paths.items():
            size = getattr(args, split)
            write_tsv(path, tqdm(islice(expressions, size), split, size))
    elif len(there) < len(paths):
        missing = ', '.join(str(path) for path in paths.values() if path not in there)
        raise UserError(f'{missing} is missing. Put it there, or delete {", ".join(map(str, there))} to make all anew.')
    for path in paths.values():
        print(summarise(path), flush=True)


def main(arguments: list[str] | None = None) -> None:
    args = parse_args(arguments)
    with readable_errors(args.debug):
        run(args)


if __name__ == '__main__':
    main()
