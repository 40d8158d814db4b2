"""Tests the generation, the values and the files of ListOps expressions."""

import re
from collections import Counter
from itertools import islice
from random import Random

import numpy as np
import pytest

from mmdtn.errors import UserError
from mmdtn.sequences import ListOps
from mmdtn.sequences.listops import (
    LRA,
    UNKNOWN,
    VOCABULARY_SIZE,
    WORDS,
    Limits,
    draw,
    draw_distinct,
    encode,
    evaluate,
    read_tsv,
    write_tsv,
)
from tools.dataset_converters.make_listops import main

SMALL = Limits(max_depth=5, max_args=5, min_length=20, max_length=64)
OPTIONS = ['--min-length', '20', '--max-length', '64', '--max-depth', '5', '--max-args', '5']
SIZES = ['--train', '30', '--val', '5', '--test', '6']


def expressions(number, limits=SMALL, seed=0):
    return list(islice(draw_distinct(Random(seed), limits), number))


def value_of_text(text):
    """Evaluates an expression with Python's parser. Each operator becomes a function of a list."""
    functions = dict(MIN=min, MAX=max, MED=lambda v: int(np.median(v)), SM=lambda v: sum(v) % 10)
    python = re.sub(r'\[(\w+)', r'\1([', text.replace(']', ']),'))
    python = re.sub(r'(\d) ', r'\1, ', python)
    return eval(python.rstrip(','), functions)


def tree_of(words):
    """Returns the binary tree of Long-Range Arena, such as ((((operator, a), b), c), ']')."""

    def parse(place):
        if words[place] not in WORDS[:4]:
            return words[place], place + 1
        tree, place = words[place], place + 1
        while words[place] != ']':
            argument, place = parse(place)
            tree = (tree, argument)
        return (tree, ']'), place + 1

    return parse(0)[0]


def with_parentheses(tree):
    return tree if isinstance(tree, str) else f'( {with_parentheses(tree[0])} {with_parentheses(tree[1])} )'


def test_the_published_example():
    words = ['[SM', '7', '8', '[MED', '1', '9', '4', '6', ']', ']']
    assert (evaluate(words), len(words)) == (0, 10)


@pytest.mark.parametrize(
    ('text', 'value'),
    [('7', 7), ('[MED 1 2 ]', 1), ('[MED 9 1 4 ]', 4), ('[SM 9 9 ]', 8), ('[MAX [MIN 3 4 ] 2 ]', 3)],
)
def test_values_by_hand(text, value):
    assert evaluate(text.split()) == value == value_of_text(text)


def test_values_against_pythons_own_parser():
    for words in expressions(200) + expressions(5, LRA):
        assert evaluate(words) == value_of_text(' '.join(words))


@pytest.mark.parametrize('text', ['', '[SM 1', '1 2', ']', '[SM ]', '[SUM 1 2 ]', '[SM 12 1 ]', '[SM 1 ] ]'])
def test_what_is_no_expression(text):
    with pytest.raises(ValueError):
        evaluate(text.split())


def exact_lengths():
    """Computes the exact probability of each length below 2000, by convolutions over the levels of the tree."""
    of_level = np.eye(2000)[1]  # level 10
    for _ in range(9):
        sums, of_arguments = [], of_level
        for _ in range(2, 11):
            of_arguments = np.convolve(of_arguments, of_level)[:2000]
            sums.append(of_arguments)
        # The operator and the bracket add two tokens to the length.
        of_level = 0.75 * np.eye(2000)[1] + 0.25 * np.roll(np.mean(sums, 0), 2)
    return of_level


@pytest.mark.slow
def test_twenty_thousand_trees_are_as_in_long_range_arena():
    lengths, shares = np.arange(501, 2000), exact_lengths()[501:]
    share, mean = shares.sum(), lengths @ shares / shares.sum()
    assert (share, mean) == pytest.approx((0.0828, 1035.0), rel=1e-3)
    rng = Random(0)
    trees = [draw(rng) for _ in range(20_000)]
    roots = Counter(len(words) == 1 for words in trees)
    assert roots[True] / len(trees) == pytest.approx(0.75, abs=0.01)
    kept = [words for words in trees if 500 < len(words) < 2000]
    assert len(kept) / len(trees) == pytest.approx(share, abs=0.006)  # three standard errors
    assert np.mean([len(words) for words in kept]) == pytest.approx(mean, abs=30)
    counts = np.bincount([evaluate(words) for words in kept], minlength=10) / len(kept)
    assert {*counts.argsort()[-2:]} == {0, 9} and counts[[0, 9]] == pytest.approx([0.17, 0.17], abs=0.03)


def test_shape_of_trees():
    """Operators and numbers of arguments should be uniformly distributed, and trees have at most 10 levels."""
    rng, operators, arguments, deepest = Random(1), Counter(), Counter(), 0
    for words in (draw(rng) for _ in range(3000)):
        depth, open_ = 1, []
        for word in words:
            if word == ']':
                arguments[open_.pop()] += 1
                depth -= 1
                continue
            if open_:
                open_[-1] += 1
            deepest = max(deepest, depth)
            if word.startswith('['):
                operators[word] += 1
                open_.append(0)
                depth += 1
    assert deepest == 10
    assert {*operators} == {'[MIN', '[MAX', '[MED', '[SM'} and {*arguments} == {*range(2, 11)}
    for counts in (operators, arguments):
        shares = np.array(list(counts.values())) / counts.total()
        assert shares == pytest.approx(1 / len(shares), rel=0.1)


def test_draws_follow_the_seed_and_the_limits():
    few = Limits(max_depth=2, max_args=2, min_length=3, max_length=5)  # an operator, two digits and a bracket
    every = expressions(400, few)
    assert len({' '.join(words) for words in every}) == 400 and {len(words) for words in every} == {4}
    assert expressions(20, seed=3) == expressions(20, seed=3) != expressions(20, seed=4)
    assert all(20 < len(words) < 64 for words in expressions(200))


def test_a_file_comes_back_as_it_was(tmp_path):
    written = expressions(20)
    write_tsv(tmp_path / 'a.tsv', written)
    assert list(read_tsv(tmp_path / 'a.tsv')) == [(words, evaluate(words)) for words in written]
    assert (tmp_path / 'a.tsv').read_text().splitlines()[0] == 'Source\tTarget'


def test_a_file_of_long_range_arena_is_read_as_it_is(tmp_path):
    written = expressions(10)
    lines = [f'{with_parentheses(tree_of(words))}\t{evaluate(words)}' for words in written]
    assert lines[0].startswith('( ( ')
    (tmp_path / 'a.tsv').write_bytes('\r\n'.join(['Source\tTarget', *lines, '']).encode())
    assert [words for words, _ in read_tsv(tmp_path / 'a.tsv')] == written


@pytest.mark.parametrize(('text', 'message'), [('a,b\n', 'Source'), ('Source\tTarget\n1\tx\n', 'line 2')])
def test_a_file_that_is_something_else(tmp_path, text, message):
    (tmp_path / 'a.tsv').write_text(text)
    with pytest.raises(UserError, match=message):
        list(read_tsv(tmp_path / 'a.tsv'))


def test_ids():
    assert VOCABULARY_SIZE == 17 and len({*WORDS}) == 15
    assert encode([*WORDS, 'x']).tolist() == [*range(1, 16), UNKNOWN] and UNKNOWN == 16


def test_the_data_set(tmp_path):
    written = expressions(4)
    write_tsv(tmp_path / 'a.tsv', written)
    data = ListOps(data_root=str(tmp_path), ann_file='a.tsv')
    assert [data[i]['tokens'].tolist() for i in range(4)] == [encode(words).tolist() for words in written]
    assert [data[i]['gt_label'] for i in range(4)] == [evaluate(words) for words in written]
    assert data.metainfo['classes'] == tuple('0123456789')
    with pytest.raises(UserError, match=r'b\.tsv does not exist.*make_listops'):
        ListOps(data_root=str(tmp_path), ann_file='b.tsv')


def test_the_tool_makes_three_files_that_share_nothing(tmp_path, capsys):
    main([str(tmp_path / 'a'), *OPTIONS, *SIZES])
    main([str(tmp_path / 'b'), *OPTIONS, *SIZES])
    found = []
    for split, size in dict(train=30, val=5, test=6).items():
        one, other = ((tmp_path / folder / f'basic_{split}.tsv').read_bytes() for folder in 'ab')
        assert one == other
        found += [tuple(words) for words, _ in read_tsv(tmp_path / 'a' / f'basic_{split}.tsv')]
        assert f'basic_{split}.tsv: {size} expressions' in capsys.readouterr().out or split != 'train'
    assert len({*found}) == len(found) == 41


def test_the_tool_checks_files_that_are_there(tmp_path, capsys):
    main([str(tmp_path), *OPTIONS, *SIZES])
    train = tmp_path / 'basic_train.tsv'
    before = train.read_bytes()
    main([str(tmp_path)])
    assert train.read_bytes() == before
    lines = before.decode().splitlines()
    value = int(lines[7][-1])
    lines[7] = f'{lines[7][:-1]}{(value + 1) % 10}'
    train.write_text('\n'.join(lines))
    with pytest.raises(SystemExit, match=rf'expression 7: the value is {value}, but the file has {(value + 1) % 10}'):
        main([str(tmp_path)])
    train.unlink()
    with pytest.raises(SystemExit, match=r'basic_train\.tsv is missing'):
        main([str(tmp_path)])
    with pytest.raises(SystemExit, match=r'--max-depth and --max-args'):
        main([str(tmp_path / 'c'), '--max-args', '1'])
