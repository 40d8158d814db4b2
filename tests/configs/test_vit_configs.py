"""Every config in configs/vit: it builds, trains a step, infers, and says what recipes and ablations say."""

from pathlib import Path

import pytest
import torch
from mmengine.registry import MODELS

from mmdtn.norms import DTN

from .helpers import added_flops, classifier_trains_a_step_and_infers, load, weight_decay_of_each_parameter

ROOT = Path(__file__).parents[2] / 'configs' / 'vit'
IMAGENET = sorted(p.name for p in ROOT.glob('*_in1k.py'))
CIFAR = sorted(p.name for p in ROOT.glob('*_cifar*.py'))


@pytest.mark.slow
@pytest.mark.parametrize('name', IMAGENET + CIFAR)
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


@pytest.mark.parametrize('name', ['vit-s-star-dtn_8xb128_in1k.py', 'vit-mini-dtn_b128_cifar10.py'])
def test_no_weight_decay_on_dtn_norms_embeddings_and_biases(name):
    cfg = load(ROOT / name)
    model = MODELS.build(cfg.model)
    decay = weight_decay_of_each_parameter(model, cfg.optim_wrapper)
    for parameter_name, p in model.named_parameters():
        spared = p.dim() == 1 or 'norm' in parameter_name or 'pos_embed' in parameter_name or 'cls_' in parameter_name
        assert (decay[id(p)] == 0) == spared, parameter_name


@pytest.mark.parametrize('data', ['cifar10', 'cifar100'])
def test_cifar_pair_differs_in_the_normaliser_alone(data):
    with_ln, with_dtn = (load(ROOT / f'vit-mini{norm}_b128_{data}.py') for norm in ('', '-dtn'))
    assert with_ln.model.backbone.pop('norm_cfg') == dict(type='LN')
    assert with_dtn.model.backbone.pop('norm_cfg') == dict(type='DTN')
    for cfg in (with_ln, with_dtn):
        cfg.pop('filename', None)
    assert with_ln.to_dict() == with_dtn.to_dict()
    assert with_ln.train_cfg.max_epochs == 300
    assert 'TensorboardVisBackend' in [backend.type for backend in with_ln.visualizer.vis_backends]
    assert tuple(with_ln.val_evaluator.topk) == (1, 5)
    model = MODELS.build(with_ln.model)
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(2.75e6, rel=0.02)


@pytest.mark.slow
def test_flops_that_dtn_adds_to_vit_s_star():
    added = added_flops(ROOT / 'vit-s-star-dtn_8xb128_in1k.py', ROOT / 'vit-s-star_8xb128_in1k.py')
    assert 0 < added <= 0.018
