"""Checks optimizer, schedule, data and model of each family's ImageNet recipe."""

import copy
import uuid
from pathlib import Path

import numpy as np
import pytest
import torch
from mmengine.config import Config
from mmengine.dataset import Compose
from mmengine.hooks import EMAHook, ParamSchedulerHook
from mmengine.runner import Runner
from PIL import Image
from timm.layers import DropPath

from mmdtn.engine.hooks import AdaptiveClipHook
from mmdtn.norms import DTN

from .helpers import read

CONFIGS = Path(__file__).parents[2] / 'configs'
DEIT = dict(
    lr=1e-3, decay=0.05, batch=128, epochs=300, warm_up=5, first=1e-6, cool_down=0, clip=None, ema=None, agc=None,
    drop_path=0.1, sampler='RepeatAugSampler',
)  # fmt: skip
RECIPES = {
    'pvt/pvt-t-dtn_8xb128_in1k': DEIT,
    'vit/vit-t-star-dtn_8xb128_in1k': dict(DEIT, ema=dict(momentum=4e-5)),
    'swin/swin-t-dtn_8xb128_in1k': dict(
        DEIT, drop_path=0.2, warm_up=20, clip=dict(max_norm=5.0), sampler='DefaultSampler'
    ),
    't2t_vit/t2t-vit-t-14-dtn_8xb64_in1k': dict(
        DEIT, lr=5e-4, batch=64, warm_up=10, first=5e-10, cool_down=10, ema=dict(momentum=4e-5),
        sampler='DefaultSampler',
    ),
    'levit/levit-128s-dtn_8xb256_in1k': dict(
        DEIT, lr=2e-3, decay=0.025, batch=256, epochs=1000, drop_path=0.0, agc=0.01,
        ema=dict(momentum=4e-5, update_buffers=True),
    ),
}  # fmt: skip


class Pictures:
    """Stand-in for ImageNet with 1280 images, all of which are the same file."""

    path = ''

    def __init__(self, pipeline, **kwargs):
        self.pipeline = Compose(pipeline)

    def __len__(self):
        return 1280

    def __getitem__(self, index):
        return self.pipeline(dict(img_path=self.path, gt_label=index % 1000))


@pytest.fixture(scope='module', params=RECIPES)
def built(request, tmp_path_factory):
    """Builds a runner with training loop, optimizer and schedulers as ``train`` does, and returns it and the recipe."""
    folder = tmp_path_factory.mktemp('recipe')
    noise = np.random.default_rng(0).integers(0, 255, (240, 300, 3), dtype=np.uint8)
    Image.fromarray(noise).save(folder / 'a.png')
    Pictures.path = str(folder / 'a.png')
    cfg = Config.fromfile(CONFIGS / f'{request.param}.py')
    cfg.train_dataloader.dataset.type = Pictures
    cfg.train_dataloader.update(num_workers=0, persistent_workers=False)
    cfg.merge_from_dict(dict(work_dir=str(folder), log_level='ERROR', experiment_name=uuid.uuid4().hex))
    runner = Runner.from_cfg(cfg)
    runner._train_loop = runner.build_train_loop(cfg.train_cfg)  # usually built by train()
    runner.optim_wrapper = runner.build_optim_wrapper(cfg.optim_wrapper)
    runner.param_schedulers = runner.build_param_scheduler(cfg.param_scheduler)
    return runner, RECIPES[request.param]


def test_adamw_without_decay_of_norms_biases_and_embeddings(built):
    runner, recipe = built
    optimizer = runner.optim_wrapper.optimizer
    assert type(optimizer) is torch.optim.AdamW
    assert runner.optim_wrapper.clip_grad_kwargs == recipe['clip']
    assert {group['initial_lr'] for group in optimizer.param_groups} == {recipe['lr']}
    assert {group['betas'] for group in optimizer.param_groups} == {(0.9, 0.999)}
    decay = {id(p): group['weight_decay'] for group in optimizer.param_groups for p in group['params']}
    assert set(decay.values()) == {0, recipe['decay']}
    of_dtn = {id(p) for m in runner.model.modules() if isinstance(m, DTN) for p in m.parameters()}
    embeddings = ('pos_embed', 'cls_token', 'cls_pos', 'relative_position_bias_table', 'attention_biases')
    for name, p in runner.model.named_parameters():
        spared = p.dim() == 1 or id(p) in of_dtn or name.rpartition('.')[2] in embeddings
        assert (decay[id(p)] == 0) == spared, name
    assert of_dtn


def test_the_learning_rate_warms_up_and_falls_as_a_cosine(built):
    runner, recipe = built
    epochs, warm, each = recipe['epochs'], recipe['warm_up'], len(runner.train_dataloader)
    assert runner.train_loop.max_epochs == epochs + recipe['cool_down'] and each == 1280 // recipe['batch']
    runner.optim_wrapper.step()  # schedulers expect a step of the optimizer first
    schedule, rates = ParamSchedulerHook(), []
    for _ in range(epochs + recipe['cool_down']):
        for i in range(each):
            rates.append(runner.optim_wrapper.get_lr()['lr'])
            schedule.after_train_iter(runner, i)
        schedule.after_train_epoch(runner)
    rates.append(runner.optim_wrapper.get_lr()['lr'])
    assert all(len(set(of_groups)) == 1 for of_groups in rates)
    rates = np.array(rates)[:, 0]
    first, top, lowest = recipe['first'], recipe['lr'], 1e-5
    steps, end = each * warm, each * epochs
    assert rates[0] == pytest.approx(first)
    np.testing.assert_allclose(np.diff(rates[:steps]), (top - first) / (steps - 1), rtol=1e-6)
    assert rates[steps] == pytest.approx(top)
    falling = np.arange(epochs - warm) / (epochs - warm)
    cosine = lowest + (top - lowest) * (1 + np.cos(np.pi * falling)) / 2
    np.testing.assert_allclose(rates[steps:end:each], cosine, rtol=1e-5)
    if recipe['cool_down']:  # mmengine's ConstantLR restores the rate in its last epoch
        np.testing.assert_allclose(rates[end : -each - 1], lowest / 10, rtol=0.01)
    else:
        assert rates[end] == pytest.approx(lowest, rel=0.01)


def test_data_and_augmentation(built):
    runner, recipe = built
    loader = runner.train_dataloader
    sampler = loader.batch_sampler.sampler
    assert type(sampler).__name__ == recipe['sampler'] and sampler.shuffle
    assert loader.batch_size == recipe['batch'] and runner.auto_scale_lr['base_batch_size'] == 8 * recipe['batch']
    if recipe['sampler'] == 'RepeatAugSampler':
        first = list(sampler)[:126]
        assert len(set(first)) == 42 and first[0] == first[1] == first[2]
    _, crop, flip, rand_augment, erase, _ = loader.dataset.pipeline.transforms
    assert (type(crop).__name__, crop.scale, crop.interpolation) == ('RandomResizedCrop', (224, 224), 'bicubic')
    assert (type(flip).__name__, flip.prob) == ('RandomFlip', 0.5)
    assert (rand_augment.magnitude_level, rand_augment.magnitude_std, rand_augment.num_policies) == (9, 0.5, 2)
    assert 'Posterize' in {p['type'] for p in rand_augment.policies} and rand_augment.total_level == 10
    assert (type(erase).__name__, erase.erase_prob, erase.mode) == ('RandomErasing', 0.25, 'rand')
    sample = loader.dataset[3]
    assert sample['inputs'].shape == (3, 224, 224) and sample['data_samples'].gt_label.item() == 3


def test_mixing_smoothing_drop_path_and_moving_average(built):
    runner, recipe = built
    mixes = runner.model.data_preprocessor.batch_augments.augments
    assert {type(mix).__name__: mix.alpha for mix in mixes} == {'Mixup': 0.8, 'CutMix': 1.0}
    loss = runner.model.head.loss_module
    assert (type(loss).__name__, loss.label_smooth_val, loss.mode) == ('LabelSmoothLoss', 0.1, 'original')
    drops = [m.drop_prob for m in runner.model.modules() if isinstance(m, DropPath)]
    blocks = len(drops) + 1  # the first block has a rate of 0
    np.testing.assert_allclose(drops, np.linspace(0, recipe['drop_path'], blocks)[1:], rtol=1e-5)
    averages = [hook.ema_cfg for hook in runner.hooks if isinstance(hook, EMAHook)]
    assert averages == ([] if recipe['ema'] is None else [dict(type='ExponentialMovingAverage', **recipe['ema'])])
    ratios = [hook.clip_factor for hook in runner.hooks if isinstance(hook, AdaptiveClipHook)]
    assert ratios == ([] if recipe['agc'] is None else [recipe['agc']])


@pytest.mark.slow
@pytest.mark.parametrize(
    'path',
    [path for family in RECIPES for path in sorted(CONFIGS.glob(f'{family.partition("/")[0]}/*_in1k.py'))],
    ids=lambda path: path.stem,
)
def test_configs_of_a_family_differ_in_the_model_alone(path):
    family = next(name for name in RECIPES if name.startswith(f'{path.parent.name}/'))
    cfg, base = (copy.deepcopy(read(p)) for p in (path, CONFIGS / f'{family}.py'))
    assert 'drop_path_rate' not in cfg.model.backbone, 'the architecture says it'
    for c in (cfg, base):
        del c.model['backbone'], c.model.head['in_channels']
    assert cfg.to_dict() == base.to_dict()
