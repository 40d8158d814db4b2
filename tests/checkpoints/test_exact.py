"""Our models compute the same as reference implementations in float64, and wrong models raise errors.

``python -m tests.checkpoints.cases`` prints the largest difference for each file.
"""

from argparse import Namespace
from functools import partial

import pytest
import torch

from mmdtn import checkpoints
from mmdtn.backbones import PVTDTN, T2TViTDTN, ViTDTN

from . import arithmetic, cases, files
from .cases import converted, images
from .published import AUTHORS

LN = dict(type='LN')
BY_SIZE = [pytest.param(case, id=case.name, marks=[pytest.mark.exhaustive] * case.large) for case in cases.CASES]
DVTS = [
    pytest.param(name, reuse, marks=[pytest.mark.exhaustive] * ((name, reuse) != ('t2t-12', 'both')))
    for name in cases.dvt.MODELS
    for reuse in cases.dvt.REUSES
]


@pytest.mark.parametrize('case', BY_SIZE)
def test_a_converted_file_computes_the_published_arithmetic(case, tmp_path):
    difference, said = cases.largest_difference(case, tmp_path)
    assert difference < 1e-11
    for words in case.says:
        assert words in said


@pytest.mark.parametrize(('name', 'reuse'), DVTS)
def test_a_dvt_computes_the_published_arithmetic(name, reuse):
    assert cases.largest_difference_of_dvt(name, reuse) < 1e-11


@torch.no_grad()
def test_an_eps_of_1e_6_would_be_another_model():
    state = cases.double(files.vit(192, kind='dtn', heads=4))
    inside = cases.authors_norm(4)
    a, b = (arithmetic.vit(images(), state, 4, eps, cls_from=10, inside=inside) for eps in (1e-5, 1e-6))
    assert (a - b).abs().max() > 1e-6


@pytest.mark.parametrize(
    ('state', 'model', 'words'),
    [
        (
            lambda: files.vit(192, kind='dtn', heads=4),
            lambda: ViTDTN('t*', norm_cfg=dict(AUTHORS, eps=1e-6)),
            'norm1.*1e-05.*1e-06',
        ),
        (
            lambda: files.vit(192, kind='dtn', heads=4),
            lambda: ViTDTN('t*', norm_cfg=AUTHORS, other_norm_cfg=dict(LN, eps=1e-6)),
            r'blocks\.10\..*eps=1e-05.*eps=1e-06.*other_norm_cfg',
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


def test_a_config_with_another_eps_is_refused_by_the_command(tmp_path):
    config = tmp_path / 'vit.py'
    config.write_text("model = dict(type='ViTDTN', arch='t*', norm_cfg=dict(type='LN'), cls_from=10)\n")
    with pytest.raises(SystemExit, match=r'eps=1e-05.* LayerNorm\(.*eps=1e-06'):
        converted(dict(state_dict=files.vit(192)), tmp_path, str(config))


@pytest.mark.parametrize(
    ('table', 'options', 'words'),
    [
        (
            files.resized(files.sines(197, 256), 18),
            dict(img_size=288),
            'learned_positions.*img_size=288',
        ),
        (torch.zeros(1, 197, 256), {}, 'learned_positions=True.*224'),
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
            partial(files.vit, 192, kind='dtn', heads=4),
            lambda: ViTDTN('t*', norm_cfg=AUTHORS, cls_from=0),
            'auto',
            'block 10.*before block 0.*cls_from=10',
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


@pytest.mark.parametrize('norm_cfg', [dict(type='GN'), dict(type='IN', unbiased=True)])
def test_the_target_says_which_norm_a_file_of_the_dtn_authors_has(norm_cfg):
    model = ViTDTN('s*', norm_cfg=norm_cfg, cls_from=10, other_norm_cfg=dict(LN, eps=1e-5))
    _, report = checkpoints.translate(files.vit(432), model)
    assert 'gnorm' in str(report)


def vit(norm_cfg, **options):
    return lambda: ViTDTN('t*', norm_cfg=norm_cfg, other_norm_cfg=dict(LN, eps=1e-5), **(dict(cls_from=10) | options))


def pvt(norm_cfg, **arch):
    return lambda: PVTDTN(dict(dict(base='tiny', num_heads=(4, 4, 5, 8)), **arch), norm_cfg, out_type='cls_token')


@pytest.mark.parametrize(
    ('state', 'model', 'words'),
    [
        (partial(files.vit, 192), vit(dict(type='IN')), r'unbiased=True.* TokenIN\(192\)'),
        (partial(files.vit, 192), vit(dict(type='GN', num_groups=2)), 'head.*num_groups=2'),
        (partial(files.vit, 192), vit(dict(type='GN'), dtn_layers=8, cls_from=10), 'cls_from=8'),
        (partial(files.vit, 192, kind='scale'), vit(dict(type='RMSNorm')), 'ScaleNorm.*RMSNorm'),
        (partial(files.vit, 192, kind='scale'), vit(dict(type='ScaleNorm', eps=1e-6)), 'eps=1e-05.*eps=1e-06'),
        (partial(files.vit, 192, kind='scale'), vit(dict(type='ScaleNorm'), cls_from=0), 'cls_from=10'),
        (partial(files.vit, 192, kind='batch'), vit(dict(type='RepBN')), "'BN'.*RepBN"),
        (partial(files.vit, 192, kind='batch'), vit(LN), "'BN'.*LayerNorm"),
        (partial(files.vit, 192, kind='power'), vit(dict(type='PowerNorm', num_groups=8)), 'num_groups=8'),
        (partial(files.vit, 192, kind='dtn_var', heads=4), vit(AUTHORS), 'mean_lambda=1.0.*DTN'),
        (partial(files.vit, 192, kind='dtn', heads=4), vit(dict(AUTHORS, mean_lambda=1.0)), 'DTN.*mean_lambda=1.0'),
        (
            partial(files.vit, 192, kind='dtn', heads=4),
            vit(dict(AUTHORS, prenorm=False)),
            'prenorm=True.*prenorm=False',
        ),
        (partial(files.pvt, kind='scale'), pvt(dict(type='BN')), 'ScaleNorm.*TokenBN'),
        (partial(files.pvt, kind='power'), pvt(dict(type='PowerNorm'), norm_heads=(2, 4, 5, 8)), 'num_groups=2'),
        (partial(files.pvt, kind='batch'), pvt(dict(type='BN'), num_heads=(1, 2, 5, 8)), '4 heads .* but 1 '),
        (partial(files.t2t, kind='un'), lambda: T2TViTDTN('7', norm_cfg=LN), "'UN'.*LayerNorm"),
        (partial(files.t2t, kind='un'), lambda: T2TViTDTN('7', norm_cfg=dict(type='UN')), 'UN.*LayerNorm'),
    ],
)
def test_another_norm_is_refused(state, model, words):
    with pytest.raises(ValueError, match=words):
        checkpoints.translate(state(), model())


@pytest.mark.parametrize(
    ('state', 'arguments', 'words'),
    [
        (partial(files.vit, 192), ['t*'], '--norm LN or --norm IN or --norm GN'),
        (files.pvt, ['tiny', '--from', 'dtn'], '--norm LN or --norm IN or --norm GN'),
        (partial(files.plain_vit, 192), ['t'], '--norm LN'),
        (partial(files.plain_vit, 192), ['t', '--norm', 'GN'], '--norm GN is not'),
        (partial(files.plain_vit, 192, 'batch'), ['t', '--norm', 'LN'], 'bn.running_var'),
        (partial(files.vit, 192, kind='scale'), ['t*', '--norm', 'LN'], '--norm LN is not'),
        (partial(files.vit, 192, bias=True), ['t', '--norm', 'LN'], '--norm LN is not'),
        (partial(files.vit, 192, kind='dtn', heads=4, inside=12), ['t*'], 'before block 12'),
    ],
)
def test_convert_asks_for_what_a_file_does_not_tell(state, arguments, words, tmp_path):
    with pytest.raises(SystemExit, match=words):
        converted(dict(state_dict=state()), tmp_path, *arguments)


@pytest.mark.parametrize(
    ('model', 'norm_type', 'arguments', 'words'),
    [
        ('vit_norm_ti_star', 'gnorm', ['t*', '--norm', 'LN'], "'GN'.*arguments"),
        ('vit_norm_ti_star', 'layer', ['t'], '4 heads, not 3'),
    ],
)
def test_arguments_of_the_training_go_before_what_is_said(model, norm_type, arguments, words, tmp_path):
    args = Namespace(model=model, norm_type=norm_type, local_up_to_layer=10)
    with pytest.raises(SystemExit, match=words):
        converted(dict(state_dict=files.vit(192), args=args), tmp_path, *arguments)


def test_a_model_takes_a_training_file_only_with_its_norm(tmp_path):
    """The arguments in the file determine the norm, because other norms have the same tensors."""
    args = Namespace(model='pvt_tiny_norm', norm_type='gnorm')
    torch.save(dict(state_dict=files.pvt(), args=args), tmp_path / 'theirs.pth')
    init_cfg = dict(type='Pretrained', checkpoint=str(tmp_path / 'theirs.pth'))
    arch = dict(base='tiny', num_heads=(4, 4, 5, 8))
    PVTDTN(arch, dict(type='GN'), out_type='cls_token', init_cfg=init_cfg).init_weights()
    with pytest.raises(ValueError, match=r'TokenGN.*not LayerNorm'):
        PVTDTN(arch, LN, out_type='cls_token', init_cfg=init_cfg).init_weights()


def test_float16_files_add_positions_to_the_class_token_in_full_precision():
    state = {key: value.half() for key, value in files.vit(192, bias=True).items()}
    state['cls_token'] += 1  # more digits than half precision has for the sum
    ours, _ = checkpoints.translate(state, ViTDTN('t', norm_cfg=LN))
    assert torch.equal(ours['cls_token'][:, 0], state['cls_token'].float() + state['pos_embed'][:, :1].float())


def test_files_of_t2t_vits_transfer_learning_are_read(tmp_path):
    state = files.t2t(kind='un')
    torch.save(
        dict(net={f'module.{key}': value for key, value in state.items()}, acc=98.3, epoch=3), tmp_path / 'a.pth'
    )
    norm_cfg = dict(type='UN')
    ours, _ = checkpoints.translate(
        checkpoints.read(tmp_path / 'a.pth'), T2TViTDTN('7', norm_cfg=norm_cfg, other_norm_cfg=norm_cfg)
    )
    for part, theirs in dict(squares='buffer_x2', grads='buffer_gz', psi='ema_gz', phi='running_var').items():
        assert torch.equal(ours[f'blocks.3.norm2.{part}'], state[f'blocks.3.norm2.{theirs}'])
    assert (ours['norm.count'], ours['norm.skipped']) == (5000, 3)


def test_the_head_of_the_dtn_authors_plain_vit():
    """The classifier is the second part of ``mlp_head``. The first part is the last norm."""
    whole = torch.nn.Module()
    whole.backbone = ViTDTN('t', norm_cfg=dict(LN, eps=1e-5))
    whole.head = torch.nn.ModuleDict(dict(fc=torch.nn.Linear(192, 10)))
    state = files.plain_vit(192)
    ours, report = checkpoints.translate(state, whole)
    assert torch.equal(ours['head.fc.weight'], state['mlp_head.1.weight']) and not report.kept and not report.dropped
