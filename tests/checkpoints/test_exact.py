"""In float64, our model computes what the published arithmetic makes of a file, and wrong models are refused.

``python -m pytest tests/checkpoints/test_exact.py -s`` prints the largest difference for each file.
"""

import sys
from functools import partial

import pytest
import torch
from mmengine.registry import MODELS

from mmdtn import checkpoints
from mmdtn.backbones import PVTDTN, T2TViTDTN, ViTDTN
from tools.model_converters import convert

from . import arithmetic, files
from .published import AUTHORS

LN = dict(type='LN')


@pytest.fixture
def through_the_command(tmp_path, monkeypatch, capsys):
    """The model that ``convert.py FILE --to NAME`` writes, in float64, and what the command printed."""

    def run(state, *arguments):
        source, out = tmp_path / 'theirs.pth', tmp_path / 'ours.pth'
        torch.save(dict(model=state), source)
        monkeypatch.setattr(sys, 'argv', ['convert.py', *map(str, (source, *arguments, '--out', out))])
        convert.main()
        settings = checkpoints.backbone_settings(checkpoints.load(str(out)))
        model = MODELS.build(dict(settings, init_cfg=dict(type='Pretrained', checkpoint=str(out))))
        model.init_weights()
        return model.eval().double(), capsys.readouterr().out

    return run


def largest_difference(model, expected, images):
    (got,) = model(images)
    return (got - expected).abs().max().item()


def images(side=224):
    return torch.randn(1, 3, side, side, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize('case', files.CASES, ids=lambda case: case.name)
@torch.no_grad()
def test_a_converted_file_computes_the_published_arithmetic(case, through_the_command):
    state = case.state()
    model, said = through_the_command(state, '--to', *case.to)
    expected = case.compute(images(case.side), {key: value.double() for key, value in state.items()})
    difference = largest_difference(model, expected, images(case.side))
    print(f'{case.name:<24} {difference:.1e}')
    assert difference < 1e-11
    for words in case.says:
        assert words in said


@torch.no_grad()
def test_an_eps_of_1e_6_would_be_another_model():
    state = files.vit(192, of_dtn=4)
    double = {key: value.double() for key, value in state.items()}
    norms = dict(dtn=files.authors_norm(4))
    a, b = (arithmetic.vit(images(), double, 4, eps, cls_from=10, **norms) for eps in (1e-5, 1e-6))
    assert (a - b).abs().max() > 1e-6


@pytest.mark.parametrize(
    ('state', 'model', 'words'),
    [
        (
            lambda: files.vit(192, of_dtn=4),
            lambda: ViTDTN('t*', norm_cfg=dict(AUTHORS, eps=1e-6)),
            'norm1.*1e-05.*1e-06',
        ),
        (
            lambda: files.vit(192, of_dtn=4),
            lambda: ViTDTN('t*', norm_cfg=AUTHORS, other_norm_cfg=dict(LN, eps=1e-6)),
            r'blocks\.10\..*eps=1e-05 .*eps=1e-06 .*other_norm_cfg',
        ),
        (lambda: files.vit(192, bias=True), lambda: ViTDTN('t', norm_cfg=dict(LN, eps=1e-5)), 'eps=1e-06 .*eps=1e-05 '),
        (
            files.pvt,
            lambda: PVTDTN('tiny', norm_cfg=LN, other_norm_cfg=dict(LN, eps=1e-6)),
            r'patch_embed\.norm .*eps=1e-05 .*eps=1e-06 ',
        ),
    ],
)
def test_another_eps_is_refused(state, model, words):
    with pytest.raises(ValueError, match=words):
        checkpoints.translate(state(), model())


@pytest.mark.parametrize(
    ('table', 'options', 'words'),
    [
        (
            files.resized(files.sines(197, 256), 18),
            dict(img_size=288),
            'not the table.*learned_positions.*img_size=288',
        ),
        (torch.zeros(1, 197, 256), {}, 'not the table.*learned_positions=True.*224'),
        (files.sines(325, 256), {}, 'for 288 px.*for 224 px.*img_size=288'),
        (files.sines(190, 256), {}, '190 rows'),
    ],
)
def test_other_positions_are_not_dropped(table, options, words):
    with pytest.raises(ValueError, match=words):
        checkpoints.translate(files.t2t(table=table), T2TViTDTN('7', norm_cfg=LN, **options))


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16, torch.float64])
def test_the_table_is_known_in_every_precision(dtype):
    state = {key: value.to(dtype) for key, value in files.t2t().items()}
    _, report = checkpoints.translate(state, T2TViTDTN('7', norm_cfg=LN))
    assert 'pos_embed' in report.dropped


def test_learned_positions_start_as_the_table():
    model = T2TViTDTN('7', norm_cfg=LN, learned_positions=True)
    model.init_weights()
    assert torch.equal(model.pos_embed.flatten(1, 2), files.sines(197, 256)[:, 1:])
    assert model.pos_embed.requires_grad and 'pos_embed' in model.state_dict()


@pytest.mark.parametrize('heads', [6, 32])
def test_heads_that_tensors_do_not_tell_are_said(heads):
    state = files.t2t(384, 14, 3)
    model = T2TViTDTN(dict(base='14', num_heads=heads), norm_cfg=LN)
    assert '6 heads' in str(checkpoints.translate(state, model)[1])
    with pytest.raises(ValueError, match=r'6 or 32 heads .* 12 .*num_heads=6'):
        checkpoints.translate(state, T2TViTDTN(dict(base='14', num_heads=12), norm_cfg=LN))


LAYER = dict(norm_cfg=dict(LN, eps=1e-5))


@pytest.mark.parametrize(
    ('state', 'model', 'source', 'words'),
    [
        (partial(files.vit, 384), lambda: ViTDTN('s', **LAYER), 'auto', r'from block 10.*before block 0.*cls_from=10'),
        (
            partial(files.vit, 384),
            lambda: ViTDTN(dict(base='s', num_heads=12), **LAYER, cls_from=10),
            'auto',
            r'6 heads in dtn-vit-ln files, but 12 .*num_heads=6\)',
        ),
        (
            partial(files.vit, 384, class_position=True),
            lambda: ViTDTN('s', **LAYER, cls_from=10),
            'dtn',
            'class position',
        ),
        (
            partial(files.vit, 192, of_dtn=4),
            lambda: ViTDTN('t*', norm_cfg=AUTHORS, cls_from=0),
            'auto',
            'behind the 10 blocks',
        ),
        (
            files.pvt,
            lambda: PVTDTN(dict(base='tiny', num_heads=(4, 4, 5, 8)), norm_cfg=LN),
            'auto',
            r'1 heads in pvt files, but 4 .*num_heads=\(1, 2, 5, 8\).*--from dtn',
        ),
        (
            files.pvt,
            lambda: PVTDTN('tiny', norm_cfg=LN),
            'dtn',
            r'4 heads in dtn-pvt-ln files, but 1 .*num_heads=\(4, 4, 5, 8\)',
        ),
    ],
)
def test_another_class_token_and_other_heads_are_refused(state, model, source, words):
    with pytest.raises(ValueError, match=words):
        checkpoints.translate(state(), model(), source)


@pytest.mark.parametrize('norm', ['GN', 'IN'])
def test_the_target_says_which_norm_a_file_of_the_dtn_authors_has(norm):
    model = ViTDTN('s*', norm_cfg=dict(type=norm), cls_from=10, other_norm_cfg=dict(LN, eps=1e-5))
    _, report = checkpoints.translate(files.vit(432), model)
    assert 'norms are those of the target' in str(report)
