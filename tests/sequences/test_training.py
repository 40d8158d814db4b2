"""Tests the configs of ListOps, and runs training, resuming and testing with the tools."""

import contextlib
import copy
from pathlib import Path

import pytest
import torch
from mmengine.registry import MODELS

from mmdtn.norms import DTN
from mmdtn.sequences import BigBirdAttention, FullAttention, ReformerAttention
from tests.configs.helpers import read
from tests.training import log_of, metrics
from tools import test as test_tool
from tools import train as train_tool
from tools.dataset_converters import make_listops

CONFIGS = Path(__file__).parents[2] / 'configs'
KINDS = dict(transformer=FullAttention, bigbird=BigBirdAttention, reformer=ReformerAttention)
LISTOPS = sorted((CONFIGS / 'listops').glob('*.py'))
SMALL = CONFIGS / 'studies' / 'transformer_listops-small.py'
OPTIONS = ['--min-length', '20', '--max-length', '64', '--max-depth', '5', '--max-args', '5']


@pytest.mark.parametrize('path', LISTOPS, ids=lambda path: path.stem)
def test_a_config_is_what_its_name_says(path):
    cfg = copy.deepcopy(read(path))
    with torch.device('meta'):
        model = MODELS.build(cfg.model)
    kind, norm = path.stem.split('_')[0].split('-')
    assert all(type(layer.attention) is KINDS[kind] for layer in model.layers)
    norms = [layer.norm1 for layer in model.layers] + [layer.norm2 for layer in model.layers]
    assert all(isinstance(m, DTN) == (norm == 'dtn') for m in norms)
    assert (len(model.layers), model.layers[0].mlp[0].out_features) == ((6, 2048) if '_6l_' in path.stem else (4, 1024))
    plain = read(CONFIGS / 'listops' / 'transformer-ln_b32-5k_listops.py')
    for name in ('attention', 'norm_cfg', 'depth', 'mlp'):
        cfg.model[name] = plain.model[name]
    assert cfg.to_dict() == plain.to_dict()


def test_there_is_every_model_with_ln_and_with_dtn():
    names = {f'{kind}-{norm}{size}_b32-5k_listops' for kind in KINDS for norm in ('ln', 'dtn') for size in ('', '_6l')}
    assert {path.stem for path in LISTOPS} == names
    readme = (CONFIGS / 'listops' / 'README.md').read_text()
    assert all(f'({name}.py)' in readme for name in names)


def test_the_recipe():
    cfg = read(LISTOPS[0])
    assert cfg.optim_wrapper.optimizer == dict(type='AdamW', lr=0.05, betas=(0.9, 0.98), eps=1e-9, weight_decay=0.1)
    assert 'paramwise_cfg' not in cfg.optim_wrapper, 'weight decay applies to all parameters'
    assert cfg.param_scheduler == [dict(type='WarmupInverseSqrtLR', warmup=1000, by_epoch=False)]
    assert cfg.train_cfg.max_iters == 5000 and cfg.train_dataloader.batch_size == 32


@pytest.fixture(scope='module')
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp('listops')
    make_listops.main([str(folder), *OPTIONS, '--train', '40', '--val', '20', '--test', '20'])
    return folder


def options(data, **more):
    loaders = [f'{name}_dataloader.dataset.data_root={data}' for name in ('train', 'val', 'test')]
    more = {'randomness.seed': 3, 'train_dataloader.batch_size': 4, 'default_hooks.logger.interval': 1} | more
    return ['--cfg-options', *loaders, *(f'{key}={value}' for key, value in more.items())]


def train(work_dir, *arguments):
    with contextlib.suppress(SystemExit):
        train_tool.main([str(SMALL), '--work-dir', str(work_dir), *arguments])


@pytest.mark.slow
@pytest.mark.parametrize(
    'model',
    [
        {'model.norm_cfg.type': 'DTN'},
        {'model.norm_cfg.type': 'BN', 'model.attention.type': 'BigBirdAttention', 'model.attention.block_size': 4},
        {'model.norm_cfg.type': 'DTN', 'model.attention.type': 'ReformerAttention'},
    ],
    ids=['transformer', 'bigbird', 'reformer'],
)
def test_a_resumed_training_does_what_an_uninterrupted_one_does(tmp_path, data, model):
    """Also checks that tools/test.py gives the same accuracy as the last validation."""
    steps = {'train_cfg.max_iters': 6, 'train_cfg.val_interval': 3, 'default_hooks.checkpoint.interval': 3} | model
    # 40 expressions are ten batches of 4. The resumed run should skip the first three batches.
    train(tmp_path / 'whole', *options(data, **steps, **{'default_hooks.checkpoint.max_keep_ckpts': 2}))
    (tmp_path / 'stopped').mkdir()
    (tmp_path / 'whole' / 'iter_3.pth').rename(tmp_path / 'stopped' / 'iter_3.pth')
    start = torch.load(tmp_path / 'stopped' / 'iter_3.pth', weights_only=False)['state_dict']
    train(tmp_path / 'stopped', '--resume', *options(data, **steps))
    one, other = (torch.load(tmp_path / run / 'iter_6.pth', weights_only=False) for run in ('whole', 'stopped'))
    assert any(not torch.equal(value, one['state_dict'][key]) for key, value in start.items())
    for key, value in one['state_dict'].items():
        assert torch.equal(value, other['state_dict'][key]), key
    assert 'accuracy/top1' in log_of(tmp_path / 'whole')
    checkpoint = str(tmp_path / 'stopped' / 'iter_6.pth')
    changed = options(data, **model, **{'test_dataloader.dataset.ann_file': 'basic_val.tsv'})
    test_tool.main([str(SMALL), checkpoint, '--work-dir', str(tmp_path / 'test'), *changed])
    measured = metrics(tmp_path / 'test')['accuracy/top1']
    assert f'accuracy/top1: {measured:.4f}' in log_of(tmp_path / 'stopped')


@pytest.mark.exhaustive
def test_five_hundred_steps_learn(tmp_path):
    """Takes a minute on one core. Always predicting the same value has an accuracy of 12%."""
    folder = tmp_path / 'data'
    make_listops.main([str(folder), *OPTIONS, '--train', '20000', '--val', '2000', '--test', '2000'])
    train(tmp_path / 'run', *options(folder, **{'train_dataloader.batch_size': 32, 'model.norm_cfg.type': 'DTN'}))
    test_tool.main([str(SMALL), str(tmp_path / 'run' / 'iter_500.pth'), '--work-dir', str(tmp_path / 'test'),
                    *options(folder, **{'model.norm_cfg.type': 'DTN'})])  # fmt: skip
    assert metrics(tmp_path / 'test')['accuracy/top1'] > 25
