"""Configs of T2T-ViT, LeViT and relative position: they build, train a step, infer, and cost what was published."""

from pathlib import Path

import pytest
import torch
import yaml
from mmengine.registry import MODELS
from timm.utils import reparameterize_model

from mmdtn.models import read_config
from mmdtn.norms import DTN
from tools.analysis_tools.get_flops import count, counted

from .helpers import classifier_trains_a_step_and_infers, load, weight_decay_of_each_parameter

CONFIGS = Path(__file__).parents[2] / 'configs'
LEVIT = [f'levit/levit-{arch}{norm}' for arch in ('128s', '192', '256') for norm in ('', '-dtn')]
LEVIT.append('levit/levit-128s-ln')
T2T = ['t2t_vit/t2t-vit-t-14', 't2t_vit/t2t-vit-t-14-dtn']
NAMES = [f'{name}_8xb256_in1k' for name in LEVIT] + [f'{name}_8xb64_in1k' for name in T2T]


def test_the_configs_are_there_and_listed():
    found = {p for folder in ('levit', 't2t_vit') for p in (CONFIGS / folder).glob('*.py')}
    assert found == {CONFIGS / f'{name}.py' for name in NAMES}
    for folder in ('levit', 't2t_vit'):
        readme = (CONFIGS / folder / 'README.md').read_text()
        names = {path.stem for path in found if path.parent.name == folder}
        assert all(f'({name}.py)' in readme for name in names)
        models = yaml.safe_load((CONFIGS / folder / 'metafile.yml').read_text())['Models']
        assert {m['Name'] for m in models} == names
        assert all((CONFIGS.parent / m['Config']).stem == m['Name'] for m in models)


@pytest.mark.slow
@pytest.mark.parametrize('name', NAMES)
def test_classifier_trains_a_step_and_infers(name):
    classifier_trains_a_step_and_infers(CONFIGS / f'{name}.py', side=224 if 'levit' in name else 64)


# GFLOPs of the papers, and parameters of one head.
PUBLISHED = {
    't2t_vit/t2t-vit-t-14_8xb64_in1k': (6.1, 21_465_422),
    'levit/levit-128s_8xb256_in1k': (0.305, 7_391_290),
    'levit/levit-192_8xb256_in1k': (0.658, 10_561_301),
    'levit/levit-256_8xb256_in1k': (1.120, 18_379_852),
}


@pytest.mark.slow
@pytest.mark.parametrize('name', PUBLISHED)
def test_flops_and_parameters_are_the_published_ones(name):
    flops, parameters = count(counted(read_config(CONFIGS / f'{name}.py')), (224, 224))
    published, exactly = PUBLISHED[name]
    assert flops / 1e9 == pytest.approx(published, rel=0.02) and parameters == exactly
    with_dtn = name.replace('_8x', '-dtn_8x')
    more, larger = count(counted(read_config(CONFIGS / f'{with_dtn}.py')), (224, 224))
    assert 0 < more / flops - 1 < 0.02 and 0 < larger / parameters - 1 < 0.002


@pytest.mark.parametrize(
    'name', ['levit/levit-128s-dtn_8xb256_in1k', 'vit/vit-s-star-rpe_8xb128_in1k', 'pvt/pvt-t-rpe_8xb128_in1k']
)
def test_no_weight_decay_on_norms_biases_and_positions(name):
    cfg = load(CONFIGS / f'{name}.py')
    model = MODELS.build(cfg.model)
    decay = weight_decay_of_each_parameter(model, cfg.optim_wrapper)
    ends = ('attention_biases', 'rpe.position', 'pos_embed', 'cls_token', 'cls_pos')
    kinds = set()
    for n, p in model.named_parameters():
        assert (decay[id(p)] == 0) == (p.dim() == 1 or 'norm' in n or n.endswith(ends)), n
        kinds.add(n.rpartition('.')[2])
    assert ('attention_biases' if 'levit' in name else 'position') in kinds


@pytest.mark.parametrize(('family', 'name', 'heads'), [('vit', 'vit-s-star', [9]), ('pvt', 'pvt-t', [1, 2, 5])])
def test_the_four_of_table_10a_differ_in_one_thing_each(family, name, heads):
    kinds = ('', '-rpe', '-dtn-uniform', '-dtn')
    plain, rpe, uniform, dtn = (load(CONFIGS / family / f'{name}{kind}_8xb128_in1k.py') for kind in kinds)
    assert rpe.model.backbone.pop('rpe') is True and rpe.model == plain.model
    assert uniform.model.backbone.norm_cfg.pop('position') == 'uniform' and uniform.model == dtn.model
    with torch.device('meta'):
        model = MODELS.build(load(CONFIGS / family / f'{name}-rpe_8xb128_in1k.py').model).backbone
    found = [len(p) for n, p in model.named_parameters() if n.endswith('rpe.position')]
    assert sorted(set(found)) == heads and not any(isinstance(m, DTN) for m in model.modules())


@torch.no_grad()
def test_a_whole_classifier_folds_its_batch_norms():
    model = MODELS.build(load(CONFIGS / 'levit/levit-128s-dtn_8xb256_in1k.py').model).eval()
    x = torch.randn(2, 3, 224, 224)
    want = model(x)
    folded = reparameterize_model(model)
    assert not any(isinstance(m, torch.nn.modules.batchnorm._BatchNorm) for m in folded.modules())
    torch.testing.assert_close(folded(x), want, rtol=1e-5, atol=1e-5)
