"""Compares the table in docs/convert.md with the output of the tool, and checks that no model is missing."""

import re

import pytest

from tools.analysis_tools.convertible_models import MM, TIMM, main

from ..pages import REPO

PAGE = (REPO / 'docs' / 'convert.md').read_text().partition('## Models that were tried')[2]
# One model for each kind of tokens: after a class token, on flat grids, as maps, in MM's models, and in another order.
FEW = ['vit_tiny_patch16_224', 'pvt_v2_b0', 'convnext_atto', 'mmdet.SwinTransformer', 'hiera_tiny_224']


def cells(line):
    return [cell.strip() for cell in line.strip().strip('|').split('|')]


def table(text):
    """Returns the rows of a table by the name of the model."""
    rows = [cells(line) for line in text.splitlines() if line.startswith('| `')]
    return {row[0].strip('`'): row for row in rows}


def test_the_page_has_every_model_that_the_tool_knows():
    assert [*table(PAGE)] == [*TIMM, *MM]


def test_differences_on_the_page_are_roundings():
    for name, (_, converted, _, _, *numbers) in table(PAGE).items():
        if converted.startswith('0 '):
            assert numbers == ['', '', ''], name
            continue
        first, other, change = numbers
        assert float(first) <= 1e-5 and (other == 'one size' or float(other) <= 1e-5), name
        assert 1e-6 < float(change) < 0.05, name


@pytest.mark.slow
@pytest.mark.parametrize(
    'name', [pytest.param(name, marks=() if name in FEW else pytest.mark.exhaustive) for name in [*TIMM, *MM]]
)
def test_the_tool_prints_what_the_page_has(name, capsys):
    main([name])
    (printed,) = table(capsys.readouterr().out).values()
    written = table(PAGE)[name]
    assert printed[:4] == written[:4]
    for got, want in zip(printed[4:6], written[4:6], strict=True):
        assert got == want or float(got) <= 1e-5  # rounding differs between processors
    assert printed[6] == written[6] or float(printed[6]) == pytest.approx(float(written[6]), rel=0.5)


CONFIG = """
default_scope = 'mmdet'
model = dict(backbone=dict(type='PyramidVisionTransformer', embed_dims=8, num_layers=[1] * 4, num_heads=[1, 2, 2, 2]))
"""


def test_a_config_of_ones_own_and_the_whole_report(tmp_path, capsys):
    config = tmp_path / 'mine.py'
    config.write_text(CONFIG)
    main([str(config), '--size', '96', '128', '--report'])
    said = capsys.readouterr().out
    (row,) = table(said).values()
    assert row[1:3] == ['4 of 15', '`B x T x C` 24 x 32, 12 x 16']
    assert re.search(r'96 x 128, .+\n  layers\.0\.1\.\d\.norm1: DTN\(8, .*prenorm=False', said)
    with pytest.raises(SystemExit, match=r'no\.py'):
        main(['no.py'])
