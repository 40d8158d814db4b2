"""Published files are read and written, wrong files are refused, and a second implementation gives the same outputs."""

import argparse
import hashlib
import math

import pytest
import torch

from mmdtn import checkpoints
from mmdtn.dvt import DVT

from . import oracle
from .published import MODELS, PREFIXES, REUSES, Model, images, shapes, weights

SMALL = dict(t2t=Model('t2t', 128, 3, 2, 256), deit=Model('deit', 128, 2, 2, 384))
PARAMETERS = {
    't2t-12': (6_989_824, 7_744_510, 7_727_182),
    't2t-14': (21_574_656, 23_156_110, 23_151_070),
    'deit-s': (22_878_952, 23_920_456, 23_642_824),
}
ALONE = {'t2t-12': 6_941_902, 't2t-14': 21_545_550, 'deit-s': 22_050_664}  # the epsilons of T2T-ViT and DeiT
# Number of tensors, and a hash of all keys and shapes in the authors' code.
FILES = {
    't2t-12': (650, 'ac5c186ca042f0f7'),
    't2t-14': (740, 'e1ec220d5e749fb0'),
    'deit-s': (608, 'c699a70652d49b47'),
}


def cascade(m: Model, features: bool = True, relations: bool = True, **options) -> DVT:
    arch = dict(family=m.family, width=m.width, depth=m.depth, num_heads=m.heads, mlp_ratio=m.hidden / m.width)
    return DVT(arch, reuse_features=features, reuse_relations=relations, **options).eval()


def small_file(family: str = 't2t') -> dict[str, torch.Tensor]:
    return weights(SMALL[family])


@pytest.mark.parametrize('name', MODELS)
def test_exported_files_have_the_published_keys_and_shapes(name):
    with torch.device('meta'):
        exported = checkpoints.to_dvt(DVT(name))
    lines = [f'{key} {tuple(value.shape)}' for key, value in sorted(exported.items())]
    assert (len(lines), hashlib.sha256('\n'.join(lines).encode()).hexdigest()[:16]) == FILES[name]


@pytest.mark.parametrize('name', MODELS)
def test_parameters_are_the_published_ones_to_the_unit(name):
    with torch.device('meta'):
        exits, alone = DVT(name).exits, DVT(name, reuse_features=False, reuse_relations=False).exits
    counts = [sum(t.numel() for t in [*exit.parameters(), *exit.buffers()]) for exit in [*exits, alone[2]]]
    assert counts == [*PARAMETERS[name], ALONE[name]]


@pytest.mark.parametrize('reuse', REUSES)
@pytest.mark.parametrize('family', SMALL)
def test_exporter_is_the_inverse_of_the_importer(family, reuse):
    features, relations = REUSES[reuse]
    file = weights(SMALL[family], features, relations)
    model = cascade(SMALL[family], features, relations)
    ours, report = checkpoints.translate(file, model)
    assert report.format == 'dvt' and report.kept == [] and report.dropped == {}
    model.load_state_dict(ours)
    back = checkpoints.to_dvt(model)
    assert back.keys() == file.keys()
    assert all(torch.equal(back[key], file[key]) for key in file)


@torch.no_grad()
def check_against_the_oracle(m: Model, features: bool, relations: bool) -> None:
    file, x = weights(m, features, relations), images()
    model = cascade(m, features, relations)
    model.load_state_dict(checkpoints.translate(file, model)[0])
    for got, want in zip(model(x), oracle.cascade(file, x, m.heads), strict=True):
        assert (got - want).abs().max() < 1e-5 * want.abs().max()


@pytest.mark.parametrize('reuse', REUSES)
@pytest.mark.parametrize('family', SMALL)
def test_every_exit_equals_a_second_implementation(family, reuse):
    check_against_the_oracle(SMALL[family], *REUSES[reuse])


@pytest.mark.exhaustive
@pytest.mark.parametrize('reuse', REUSES)
@pytest.mark.parametrize('name', MODELS)
def test_every_exit_of_the_published_models_equals_a_second_implementation(name, reuse):
    check_against_the_oracle(MODELS[name], *REUSES[reuse])


def test_the_keys_are_those_of_the_document():
    """The tests draw weights for all tensors of the published files."""
    for name, m in MODELS.items():
        assert len(shapes(m)) == FILES[name][0]
        assert sum(math.prod(shape) for shape in shapes(m).values()) == sum(PARAMETERS[name])


def without(key):
    return lambda file: file.pop(key)


def other_positions(file):
    file[f'{PREFIXES[1]}.pos_embed'] = file[f'{PREFIXES[1]}.pos_embed'].flip(1)


def cut_last_exit(file):
    for key in [key for key in file if key.startswith(PREFIXES[2])]:
        del file[key]


def rename(old, new):
    def change(file):
        file[new] = file.pop(old)

    return change


def shorten(key):
    def change(file):
        file[key] = file[key][:-1]

    return change


@pytest.mark.parametrize(
    ('change', 'words'),
    [
        (without('less_token.blocks.1.feature_resuse_mlp.0.bias'), r'no exits\.1\.blocks\.1\.features\.norm\.bias'),
        (without('normal_token.head.weight'), r'no exits\.2\.head\.weight'),
        (cut_last_exit, r'no exits\.2\.'),
        (other_positions, r'less_token\.pos_embed is not the table of sines'),
        (rename('normal_token.norm.bias', 'normal_token.norm.bais'), r'normal_token\.norm\.bais'),
        (shorten('normal_token.blocks.0.attn.proj.bias'), r'exits\.2\.blocks\.0\.attn\.proj\.bias is \(127,\)'),
        (lambda f: f.update({'extra.weight': torch.ones(1)}), r'extra\.weight'),
        (lambda f: f.update({'normal_token.blocks.3.norm1.bias': torch.ones(128)}), r'no exits\.2\.blocks\.3\.norm1'),
    ],
)
def test_files_that_do_not_fit_are_refused_by_name(change, words):
    file = small_file()
    change(file)
    with pytest.raises(ValueError, match=words):
        checkpoints.translate(file, cascade(SMALL['t2t']))


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16, torch.float64])
def test_files_in_other_precisions_are_read(dtype):
    file = {key: value.to(dtype) for key, value in small_file().items()}
    state, _ = checkpoints.translate(file, cascade(SMALL['t2t']))
    assert torch.equal(state['exits.0.head.weight'], file[f'{PREFIXES[0]}.head.weight'].float())
    file[f'{PREFIXES[1]}.pos_embed'] = file[f'{PREFIXES[1]}.pos_embed'].flip(1)
    with pytest.raises(ValueError, match='not the table of sines'):
        checkpoints.translate(file, cascade(SMALL['t2t']))


def test_files_of_other_models_are_refused():
    file = {key.removeprefix('normal_token.'): value for key, value in small_file().items() if 'normal' in key}
    with pytest.raises(ValueError, match=r't2t .*T2TViTDTN.*DVT'):
        checkpoints.translate(file, cascade(SMALL['t2t']))
    published = Model('t2t', 256, 1, 4, 256)
    with pytest.raises(ValueError, match='4 heads in dvt files, but 2 in the target'):
        checkpoints.translate(
            weights(published, relations=False), cascade(published._replace(heads=2), relations=False)
        )


def test_models_that_the_layout_cannot_hold_are_not_exported():
    arch = dict(base='deit-s', width=48, depth=1, num_heads=3)
    with pytest.raises(ValueError, match=r'exits\.0\.blocks\.0\.norm1\.alpha'):
        checkpoints.to_dvt(DVT(arch, grids=(2, 4), img_size=32, norm_cfg=dict(type='DyT')))
    with pytest.raises(ValueError, match='model has 4'):
        checkpoints.to_dvt(DVT(arch, grids=(2, 4, 4, 8), img_size=32))


def test_weights_are_found_in_published_files_and_in_those_that_training_writes(tmp_path):
    file = small_file()
    published = dict(model_state_dict=file, flops=[1.0, 2.0, 3.0], dynamic_threshold=torch.zeros(59, 3))
    average = {f'module.{key}': value for key, value in file.items()}
    training = dict(state_dict={}, state_dict_ema=average, epoch=3, arch='x', args=argparse.Namespace(lr=0.1))
    for content in (published, training):
        torch.save(content, tmp_path / 'file.pth')
        read = checkpoints.read(tmp_path / 'file.pth')
        assert read.keys() == file.keys()
        assert all(torch.equal(read[key], file[key]) for key in file)
