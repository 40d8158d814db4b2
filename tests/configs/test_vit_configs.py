"""Every config in configs/vit: it builds, trains a step, infers, and says what recipes and ablations say."""

import json
from pathlib import Path

import pytest
import torch
import yaml
from mmengine.registry import DATASETS, METRICS, MODELS

from mmdtn.norms import DTN, TokenNorm
from mmdtn.registry import class_of
from tests.training import run_tool

from .helpers import added_flops, classifier_trains_a_step_and_infers, load, weight_decay_of_each_parameter

ROOT = Path(__file__).parents[2] / 'configs' / 'vit'
SIBLINGS = dict(
    bn='TokenBN(432)',
    gn='TokenGN(432, num_groups=9)',
    scalenorm='ScaleNorm(432)',
    sn='SN(432)',
    powernorm='PowerNorm(432, num_groups=9, warmup_iters=3000)',
    rmsnorm='RMSNorm(432)',
    dyt='DyT(432)',
    derf='Derf(432)',
    un='UN(432)',
    prepbn='PRepBN(432)',
    featurenorm='FeatureNorm(432, num_heads=9)',
    **{'in': 'TokenIN(432, unbiased=True)'},
)
IN_TABLE_3 = ('bn', 'in', 'gn', 'sn', 'scalenorm', 'powernorm')
OTHERS = {p.name for norm in SIBLINGS for p in ROOT.glob(f'*-{norm}_*.py')}
IMAGENET = sorted({p.name for p in ROOT.glob('*_in1k.py')} - OTHERS)
CIFAR = sorted({p.name for p in ROOT.glob('vit-mini*_cifar*.py')} - OTHERS)


@pytest.mark.slow
@pytest.mark.parametrize('name', [*IMAGENET, *CIFAR, *sorted(name for name in OTHERS if name.endswith('cifar10.py'))])
def test_classifier_trains_a_step_and_infers(name):
    classifier_trains_a_step_and_infers(ROOT / name, side=64 if name in IMAGENET else 32)


@pytest.mark.parametrize(
    ('ablation', 'settings'),
    [
        ('lambda-1', dict(mean_lambda=1.0, var_lambda=1.0)),
        ('lambda-0-uniform', dict(mean_lambda=0.0, var_lambda=0.0, position='uniform')),
        ('lambda-0', dict(mean_lambda=0.0, var_lambda=0.0)),
        ('lambda-half', dict(mean_lambda=0.5, var_lambda=0.5)),
        ('trunc-normal', dict(position_init='trunc_normal')),
        ('uniform', dict(position='uniform')),
        ('4-layers', dict(layers=4)),
        ('6-layers', dict(layers=6)),
        ('8-layers', dict(layers=8)),
    ],
)
def test_an_ablation_changes_one_thing_of_the_whole_model(ablation, settings):
    settings = dict(settings)
    layers = settings.pop('layers', 10)
    want = {repr(DTN(432, num_heads=9, pool_size=1, **settings))}
    with torch.device('meta'):
        model = MODELS.build(load(ROOT / f'vit-s-star-dtn-{ablation}_8xb128_in1k.py').model)
    dtn = {name: repr(m) for name, m in model.backbone.named_modules() if isinstance(m, DTN)}
    assert {*dtn} == {f'blocks.{i}.norm{n}' for i in range(layers) for n in (1, 2)}
    assert {*dtn.values()} == want
    assert model.backbone.cls_from == layers


@pytest.mark.parametrize('arch', ['s', 's-star'])
@pytest.mark.parametrize('norm', SIBLINGS)
def test_a_sibling_of_dtn_takes_its_place(norm, arch):
    file = f'vit-{arch}-{norm}_8xb128_in1k.py'
    if arch == 's' and norm not in IN_TABLE_3:
        assert not (ROOT / file).exists()
        return
    cfg, baseline = load(ROOT / file), load(ROOT / f'vit-{arch}_8xb128_in1k.py')
    with torch.device('meta'):
        model = MODELS.build(cfg.model).backbone
    norms = {n: f'{type(m).__name__}({m.extra_repr()})' for n, m in model.named_modules() if isinstance(m, TokenNorm)}
    assert {*norms} == {f'blocks.{i}.norm{n}' for i in range(10) for n in (1, 2)}
    want = SIBLINGS[norm] if arch == 's-star' else SIBLINGS[norm].replace('432', '384').replace('=9', '=6')
    assert {*norms.values()} == {want}
    assert model.cls_from == 10
    for c in (cfg, baseline):
        c.pop('filename', None)
        c.model.backbone.pop('norm_cfg')
    cfg.model.backbone.pop('cls_from')
    assert cfg.to_dict() == baseline.to_dict()


def test_readme_has_the_papers_table_3_and_metafile_every_config_of_it():
    readme = (ROOT / 'README.md').read_text()
    metafile = yaml.safe_load((ROOT / 'metafile.yml').read_text())['Models']
    listed = {m['Name'] for m in metafile}
    assert all((ROOT.parents[1] / m['Config']).exists() for m in metafile)
    table = dict(LN=(79.9, 80.6), BN=(77.3, 77.2), IN=(77.7, 77.6), GN=(78.3, 79.5), SN=(80.1, 81.0))
    table |= dict(ScaleNorm=(80.0, 80.6), PowerNorm=(79.8, 80.4), DTN=(80.6, 81.7))
    for norm, values in table.items():
        suffix = '' if norm == 'LN' else f'-{norm.lower()}'
        names = [f'vit-{arch}{suffix}_8xb128_in1k' for arch in ('s', 's-star')]
        assert listed >= set(names)
        cells = [f'[{value}]({name}.py)' for value, name in zip(values, names, strict=True)]
        assert f'| {norm} | {cells[0]} | {cells[1]} |' in readme
    assert all(f'({name})' in readme for name in OTHERS if 'in1k' in name)


@pytest.mark.parametrize('name', ['vit-s-star-dtn_8xb128_in1k.py', 'vit-mini-dtn_b128_cifar10.py'])
def test_no_weight_decay_on_dtn_norms_embeddings_and_biases(name):
    cfg = load(ROOT / name)
    model = MODELS.build(cfg.model)
    decay = weight_decay_of_each_parameter(model, cfg.optim_wrapper)
    for parameter_name, p in model.named_parameters():
        spared = p.dim() == 1 or 'norm' in parameter_name or 'pos_embed' in parameter_name or 'cls_' in parameter_name
        assert (decay[id(p)] == 0) == spared, parameter_name


@pytest.mark.parametrize('norm', ['dtn', *SIBLINGS])
@pytest.mark.parametrize('data', ['cifar10', 'cifar100'])
def test_cifar_configs_differ_in_the_normaliser_alone(data, norm):
    with_ln, with_other = (load(ROOT / f'vit-mini{name}_b128_{data}.py') for name in ('', f'-{norm}'))
    assert with_ln.model.backbone.pop('norm_cfg') == dict(type='LN')
    assert with_other.model.backbone.pop('norm_cfg')['type'].lower() == norm
    for cfg in (with_ln, with_other):
        cfg.pop('filename', None)
    assert with_ln.to_dict() == with_other.to_dict()
    if norm != 'dtn':
        return
    assert with_ln.train_cfg.max_epochs == 300
    assert 'TensorboardVisBackend' in [backend.type for backend in with_ln.visualizer.vis_backends]
    assert tuple(with_ln.val_evaluator.topk) == (1, 5)
    model = MODELS.build(with_ln.model)
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(2.75e6, rel=0.02)


@pytest.mark.parametrize('norm', ['dtn', 'bn', 'un', 'featurenorm'])
@pytest.mark.parametrize('data', ['cifar10', 'cifar100'])
def test_cifar_at_224_px_differs_in_the_normaliser_alone(data, norm):
    with_ln, with_other = (load(ROOT / f'vit-b{name}_b128_{data}-224.py') for name in ('', f'-{norm}'))
    assert with_other.model.backbone.norm_cfg.type.lower() == norm
    for cfg in (with_ln, with_other):
        cfg.pop('filename', None)
        cfg.model.backbone.pop('norm_cfg')
    assert with_ln.to_dict() == with_other.to_dict()
    classes = {'cifar10': 10, 'cifar100': 100}[data]
    assert with_ln.model.head.num_classes == with_ln.data_preprocessor.num_classes == classes


def test_cifar_at_224_px_has_the_flags_of_the_study():
    cfg = load(ROOT / 'vit-b_b128_cifar10-224.py')
    with torch.device('meta'):
        model = MODELS.build(cfg.model)
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(86e6, rel=0.01)
    optimizer = cfg.optim_wrapper.optimizer
    assert dict(optimizer) == dict(type='SGD', lr=0.01, momentum=0.9, weight_decay=5e-5)
    assert cfg.train_dataloader.batch_size == 128 and cfg.train_cfg.max_epochs == 300
    (schedule,) = cfg.param_scheduler
    assert (schedule.type, schedule.T_max, schedule.eta_min) == ('CosineAnnealingLR', 300, 0.01 * optimizer.lr)
    crops = [[t.type for t in loader.dataset.pipeline] for loader in (cfg.train_dataloader, cfg.val_dataloader)]
    assert crops == [['RandomResizedCrop', 'RandomFlip', 'PackInputs'], ['ResizeEdge', 'CenterCrop', 'PackInputs']]
    assert cfg.default_hooks.checkpoint.interval == 50


@pytest.mark.slow
def test_cifar_at_224_px_logs_loss_and_accuracy_of_training_and_test(tmp_path):
    """A run with a smaller model, on pictures made here, through all of the config but its data set."""
    from mmdtn.datasets import write_classification

    data = write_classification(tmp_path / 'classes', train=6, val=4)
    loader = 'dict(batch_size=3, num_workers=0, persistent_workers=False, dataset=dict(_delete_=True, {}))'
    folder = "type='CustomDataset', data_root='{}', data_prefix='{}', pipeline=[dict(type='LoadImageFromFile'), *{}]"
    lines = [f"_base_ = '{ROOT}/vit-b-featurenorm_b128_cifar10-224.py'"]
    lines += ['model = dict(backbone=dict(arch=dict(_delete_=True, width=24, depth=11, num_heads=3, mlp_ratio=1)),']
    lines += ['             head=dict(in_channels=24))']
    for split, prefix, pipeline in (('train', 'train', 'train_transforms'), ('val', 'val', 'test_transforms')):
        of_folder = folder.format(data, prefix, f'_base_.{pipeline}')
        lines.append(f'{split}_dataloader = {loader.format(of_folder)}')
    lines += ['train_cfg = dict(max_epochs=2)', 'default_hooks = dict(checkpoint=dict(interval=2))']
    (tmp_path / 'small.py').write_text('\n'.join(lines) + '\n')
    run_tool('train.py', tmp_path / 'small.py', '--work-dir', tmp_path / 'work', cwd=tmp_path)
    (scalars,) = tmp_path.glob('work/*/vis_data/scalars.json')
    seen = [json.loads(line) for line in scalars.read_text().splitlines()]
    keys = {'loss', 'accuracy_top-1', 'epoch_loss', 'epoch_accuracy'}
    tested = [line for line in seen if 'loss/cross_entropy' in line]
    assert [line['step'] for line in tested] == [1, 2] and all('accuracy/top1' in line for line in tested)
    assert [*tmp_path.glob('work/*/vis_data/events.out.tfevents*')]
    trained = [line for line in seen if 'lr' in line]
    assert all(keys <= line.keys() for line in trained) and len(trained) >= 2, seen


@pytest.mark.parametrize(
    'name', ['pvt/pvt-t_8xb128_in1k', 'vit/vit-b-un_b128_cifar10-224', 'vit/vit-mini-dtn_4e_cifar10-folder']
)
def test_a_classifier_is_found_by_the_name_of_the_package(tmp_path, name):
    """mmengine then takes its classes to be of this package's scope, unless they say theirs."""
    (tmp_path / 'mine.py').write_text(f"_base_ = 'mmdtn::{name}.py'\n")
    cfg = load(tmp_path / 'mine.py')
    with torch.device('meta'):
        MODELS.build(cfg.model)
    evaluators = cfg.val_evaluator if isinstance(cfg.val_evaluator, list) else [cfg.val_evaluator]
    found = [class_of(cfg.train_dataloader.dataset, DATASETS), *(class_of(e, METRICS) for e in evaluators)]
    assert found[0].__module__.startswith('mmpretrain.') and found[1].__name__ == 'Accuracy'


@pytest.mark.slow
def test_flops_that_dtn_adds_to_vit_s_star():
    added = added_flops(ROOT / 'vit-s-star-dtn_8xb128_in1k.py', ROOT / 'vit-s-star_8xb128_in1k.py')
    assert 0 < added <= 0.018
