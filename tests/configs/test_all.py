"""All configs build, train for a step and infer, and they differ only in what their names state."""

import copy
from pathlib import Path

import pytest
import torch
import yaml
from mmengine.registry import DATASETS, METRICS, MODELS

from mmdtn.engine.launch import add_runtime
from mmdtn.models import enter_scope
from mmdtn.norms import DTN
from mmdtn.registry import class_of
from tools.train import RUNTIME

from .helpers import (
    added_flops,
    classifier_trains_a_step_and_infers,
    load,
    read,
    weight_decay_of_each_parameter,
)

CONFIGS = Path(__file__).parents[2] / 'configs'
PATHS = [path for path in sorted(CONFIGS.glob('[!_]*/*.py')) if 'variants' not in path.read_text()]
FAMILIES = ('pvt', 'swin', 'vit', 'levit', 't2t_vit')
DETECTORS = [p for family in FAMILIES for p in sorted((CONFIGS / family).glob('*_fpn_*1x_coco.py'))]
DETECTORS = [
    p for p in DETECTORS if p.name.startswith(('retinanet', 'mask-rcnn'))
]  # the other configs are in test_detector_configs
CLASSIFIERS = [p for family in FAMILIES for p in sorted((CONFIGS / family).glob('*_in1k.py'))]
SMALL = sorted((CONFIGS / 'vit').glob('vit-mini*_b128_*.py'))
# `make test` trains one config of each kind for a step, and `make test-all` trains all configs.
CHEAP = (
    'pvt-t-dtn_8x', 'pvt-t_8x', 'pvtv2-b3-dtn', 'swin-t', 'vit-t-star-dtn', 'vit-s-star_8x', 'levit-128s',
    't2t-vit-t-14', 'vit-mini',
)  # fmt: skip


def named(path: Path) -> str:
    return path.stem


def costly(paths: list[Path]) -> list:
    return [p if p.name.startswith(CHEAP) else pytest.param(p, marks=pytest.mark.exhaustive) for p in paths]


@pytest.mark.parametrize('path', PATHS, ids=named)
def test_a_config_says_what_tools_train_runs(path):
    cfg = copy.deepcopy(read(path))
    enter_scope(cfg)
    assert add_runtime(cfg, RUNTIME) == [] and 'by_epoch' not in cfg.train_cfg
    assert cfg.to_dict() == read(path).to_dict()


@pytest.mark.slow
@pytest.mark.parametrize('path', costly([*CLASSIFIERS, *SMALL]), ids=named)
def test_a_classifier_trains_a_step_and_infers(path):
    classifier_trains_a_step_and_infers(path, side=224 if 'levit' in path.name else 32 if path in SMALL else 64)


@pytest.mark.parametrize('path', [p for p in CLASSIFIERS if 'levit' not in p.name], ids=named)
def test_head_and_backbone_fit(path):
    cfg = load(path)
    with torch.device('meta'):
        model = MODELS.build(cfg.model)
        assert model.head(model.backbone(torch.zeros(1, 3, 64, 64))).shape == (1, 1000)
    assert any(isinstance(m, DTN) for m in model.modules()) == ('-dtn' in path.name)


@pytest.mark.parametrize('path', DETECTORS, ids=named)
def test_detectors_of_a_kind_differ_in_the_backbone_alone(path):
    kind, backbone = path.name.split('_')[:2]
    sibling = load(path.parent / f'{kind}_{backbone.partition("-")[0].removesuffix("v2")}-t-dtn_fpn_1x_coco.py')
    cfg = load(path)
    with torch.device('meta'):
        backbone, neck = MODELS.build(cfg.model.backbone), MODELS.build(cfg.model.neck)
        assert len(neck(backbone(torch.zeros(1, 3, 64, 96)))) == cfg.model.neck.num_outs
    assert any(isinstance(m, DTN) for m in backbone.modules()) == ('-dtn' in path.name)
    for c in (cfg, sibling):
        del c.model['backbone'], c.model.neck['in_channels']
    assert cfg.model == sibling.model


@pytest.mark.parametrize('path', DETECTORS, ids=named)
def test_the_recipe_of_detectors(path):
    cfg = load(path)
    swin, retinanet = path.parent.name == 'swin', path.name.startswith('retinanet')
    head = cfg.model.bbox_head if retinanet else cfg.model.roi_head.bbox_head
    assert head.num_classes == 80
    lr, decay = (1e-4, 0.05) if swin else (1e-4 if retinanet else 2e-4, 1e-4)
    assert cfg.optim_wrapper.optimizer == dict(type='AdamW', lr=lr, weight_decay=decay)
    assert cfg.train_cfg.max_epochs == 12 and cfg.param_scheduler[1].milestones == [8, 11]
    assert cfg.auto_scale_lr.base_batch_size == 16 and cfg.train_dataloader.batch_size == 2
    pipeline = cfg.train_dataloader.dataset.pipeline
    resize = next(t for t in pipeline if 'Resize' in t.type)
    sides = list(range(480, 801, 32)) if '_ms-' in path.name else [800]
    assert [s[1] for s in resize.get('scales', [resize.get('scale')])] == sides
    assert next(t for t in pipeline if t.type == 'LoadAnnotations').get('with_mask', False) == (not retinanet)


NORMS = dict(
    bn='BN', gn='GN', scalenorm='ScaleNorm', sn='SN', powernorm='PowerNorm', rmsnorm='RMSNorm', dyt='DyT', derf='Derf',
    un='UN', prepbn='PRepBN', featurenorm='FeatureNorm', dtn='DTN', **{'in': 'IN'},
)  # fmt: skip
SIBLINGS = [
    (path, norm, path.with_name(path.name.replace(f'-{norm}_', '_', 1)))
    for path in PATHS
    for norm in NORMS
    if f'-{norm}_' in path.name and path.name.startswith(('vit-s', 'vit-mini', 'vit-b', 'vit-t-star'))
]
SIBLINGS = [(*both, plain) for *both, plain in SIBLINGS if plain.exists()]


@pytest.mark.parametrize(('path', 'norm', 'plain'), SIBLINGS, ids=lambda value: getattr(value, 'stem', value))
def test_siblings_differ_in_the_normaliser_alone(path, norm, plain):
    cfg, with_ln = load(path), load(plain)
    assert cfg.model.backbone.norm_cfg['type'] == NORMS[norm] and with_ln.model.backbone.norm_cfg['type'] == 'LN'
    with torch.device('meta'):
        places = [MODELS.build(c.model.backbone).cls_from for c in (cfg, with_ln)]
    assert 'star' not in path.name or norm == 'dtn' or places[0] == 10, 'as with DTN'
    for c in (cfg, with_ln):
        for key in ('norm_cfg', 'cls_from', 'other_norm_cfg'):
            c.model.backbone.pop(key, None)
    assert cfg.to_dict() == with_ln.to_dict()


@pytest.mark.parametrize(
    ('ablation', 'settings'),
    [
        ('lambda-1', dict(mean_lambda=1.0, var_lambda=1.0)),
        ('lambda-0-uniform', dict(mean_lambda=0.0, var_lambda=0.0, position='uniform')),
        ('lambda-0', dict(mean_lambda=0.0, var_lambda=0.0)),
        ('lambda-half', dict(mean_lambda=0.5, var_lambda=0.5)),
        ('trunc-normal', dict(position_init='trunc_normal')),
        ('uniform', dict(position='uniform')),
        *((f'{layers}-layers', dict(layers=layers)) for layers in (4, 6, 8)),
    ],
)
def test_an_ablation_changes_one_thing_of_the_whole_model(ablation, settings):
    settings = dict(settings)
    layers = settings.pop('layers', 10)
    with torch.device('meta'):
        model = MODELS.build(load(CONFIGS / f'vit/vit-s-star-dtn-{ablation}_8xb128_in1k.py').model)
    dtn = {name: repr(m) for name, m in model.backbone.named_modules() if isinstance(m, DTN)}
    assert {*dtn} == {f'blocks.{i}.norm{n}' for i in range(layers) for n in (1, 2)}
    assert {*dtn.values()} == {repr(DTN(432, num_heads=9, pool_size=1, **settings))}
    assert model.backbone.cls_from == layers


@pytest.mark.parametrize(('family', 'name', 'heads'), [('vit', 'vit-s-star', [9]), ('pvt', 'pvt-t', [1, 2, 5])])
def test_the_four_of_table_10a_differ_in_one_thing_each(family, name, heads):
    kinds = ('', '-rpe', '-dtn-uniform', '-dtn')
    plain, rpe, uniform, dtn = (load(CONFIGS / family / f'{name}{kind}_8xb128_in1k.py') for kind in kinds)
    assert rpe.model.backbone.pop('rpe') is True and rpe.model == plain.model
    assert uniform.model.backbone.norm_cfg.pop('position') == 'uniform' and uniform.model == dtn.model
    with torch.device('meta'):
        model = MODELS.build(load(CONFIGS / family / f'{name}-rpe_8xb128_in1k.py').model).backbone
    assert sorted({len(p) for n, p in model.named_parameters() if n.endswith('rpe.position')}) == heads


@pytest.mark.parametrize(
    'name',
    [
        *('pvt/retinanet_pvt-t-dtn_fpn_1x_coco', 'pvt/mask-rcnn_pvt-s-dtn_fpn_1x_coco', 'pvt/pvt-t-dtn_8xb128_in1k'),
        *('pvt/pvt-t-rpe_8xb128_in1k', 'swin/mask-rcnn_swin-t-dtn_fpn_1x_coco', 'swin/swin-t-dtn_8xb128_in1k'),
        *('vit/vit-s-star-dtn_8xb128_in1k', 'vit/vit-s-star-rpe_8xb128_in1k', 'vit/vit-mini-dtn_b128_cifar10'),
        'levit/levit-128s-dtn_8xb256_in1k',
    ],
)
def test_no_weight_decay_on_norms_and_positions(name):
    """Biases of classifiers have no weight decay, either."""
    cfg = load(CONFIGS / f'{name}.py')
    model = MODELS.build(cfg.model)
    decay = weight_decay_of_each_parameter(model, cfg.optim_wrapper)
    ends = ('attention_biases', 'rpe.position', 'pos_embed', 'cls_token', 'cls_pos', 'relative_position_bias_table')
    for key, p in model.backbone.named_parameters():
        spared = 'norm' in key or key.endswith(ends) or (p.dim() == 1 and not name.endswith('coco'))
        assert (decay[id(p)] == 0) == spared, key
    dtn = [p for m in model.modules() if isinstance(m, DTN) for p in m.parameters()]
    assert bool(dtn) == ('-dtn' in name) and all(decay[id(p)] == 0 for p in dtn)


@pytest.mark.slow
@pytest.mark.parametrize(
    ('name', 'limit'),
    [
        *(('pvt/pvt-t', 0.015), ('swin/swin-t', 0.02), ('vit/vit-s-star', 0.018)),
        *(pytest.param(f'pvt/pvt{name}', 0.025, marks=pytest.mark.exhaustive) for name in ('-s', '-m', '-l', 'v2-b3')),
        pytest.param('swin/swin-s', 0.02, marks=pytest.mark.exhaustive),
    ],
)
def test_flops_that_dtn_adds(name, limit):
    assert 0 < added_flops(CONFIGS / f'{name}-dtn_8xb128_in1k.py', CONFIGS / f'{name}_8xb128_in1k.py') <= limit


# GFLOPs from the papers, and parameters of models with one head.
PUBLISHED = {
    't2t_vit/t2t-vit-t-14_8xb64_in1k': (6.1, 21_465_422),
    'levit/levit-128s_8xb256_in1k': (0.305, 7_391_290),
    'levit/levit-192_8xb256_in1k': (0.658, 10_561_301),
    'levit/levit-256_8xb256_in1k': (1.120, 18_379_852),
}


@pytest.mark.slow
@pytest.mark.parametrize('name', PUBLISHED)
def test_flops_and_parameters_are_the_published_ones(name):
    from mmdtn.models import read_config
    from tools.analysis_tools.get_flops import count, counted

    flops, parameters = count(counted(read_config(CONFIGS / f'{name}.py')), (224, 224))
    published, exactly = PUBLISHED[name]
    assert flops / 1e9 == pytest.approx(published, rel=0.02) and parameters == exactly
    more, larger = count(counted(read_config(CONFIGS / f'{name.replace("_8x", "-dtn_8x")}.py')), (224, 224))
    assert 0 < more / flops - 1 < 0.02 and 0 < larger / parameters - 1 < 0.002


@pytest.mark.parametrize(
    'name', ['pvt/pvt-t_8xb128_in1k', 'vit/vit-b-dtn_b128_cifar10-224', 'vit/vit-mini-dtn_4e_cifar10-folder']
)
def test_a_classifier_is_found_by_the_name_of_the_package(tmp_path, name):
    """mmengine then looks up types without a scope in the scope of this package."""
    (tmp_path / 'mine.py').write_text(f"_base_ = 'mmdtn::{name}.py'\n")
    cfg = load(tmp_path / 'mine.py')
    with torch.device('meta'):
        MODELS.build(cfg.model)
    evaluators = cfg.val_evaluator if isinstance(cfg.val_evaluator, list) else [cfg.val_evaluator]
    found = [class_of(cfg.train_dataloader.dataset, DATASETS), *(class_of(e, METRICS) for e in evaluators)]
    assert found[0].__module__.startswith('mmpretrain.') and found[1].__name__ == 'Accuracy'


@pytest.mark.parametrize('family', [*FAMILIES, 'dvt'])
def test_readme_and_metafile_name_configs_that_exist(family):
    names = {path.stem for path in (CONFIGS / family).glob('*.py')}
    models = yaml.safe_load((CONFIGS / family / 'metafile.yml').read_text())['Models']
    assert {m['Name'] for m in models} <= names
    assert all((CONFIGS.parent / m['Config']).stem == m['Name'] for m in models)
    readme = (CONFIGS / family / 'README.md').read_text()
    assert all(f'{name}.py' in readme for name in names if family != 'vit' or name.endswith('in1k'))


def test_the_table_of_normalisers_is_the_papers():
    readme = (CONFIGS / 'vit/README.md').read_text()
    table = dict(LN=(79.9, 80.6), BN=(77.3, 77.2), IN=(77.7, 77.6), GN=(78.3, 79.5), SN=(80.1, 81.0))
    table |= dict(ScaleNorm=(80.0, 80.6), PowerNorm=(79.8, 80.4), DTN=(80.6, 81.7))
    for norm, values in table.items():
        suffix = '' if norm == 'LN' else f'-{norm.lower()}'
        cells = [f'[{v}](vit-{a}{suffix}_8xb128_in1k.py)' for v, a in zip(values, ('s', 's-star'), strict=True)]
        assert f'| {norm} | {cells[0]} | {cells[1]} |' in readme
