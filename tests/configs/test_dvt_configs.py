"""Every config in configs/dvt builds, trains for a step, infers, and agrees with the published recipe."""

import copy
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from mmengine.dataset import Compose
from mmengine.hooks import EMAHook
from mmengine.optim import build_optim_wrapper
from mmengine.registry import HOOKS, MODELS, PARAM_SCHEDULERS, init_default_scope
from PIL import Image

from mmdtn.dvt import DVT
from mmdtn.norms import DTN

from .helpers import read, step

ROOT = Path(__file__).parents[2] / 'configs' / 'dvt'
NAMES = sorted(p.name for p in ROOT.glob('*.py'))
IMAGENET = [name for name in NAMES if name.endswith('_in1k.py')]
CIFAR = [name for name in NAMES if '_b64_cifar' in name]
# Learning rate, weight decay, warm-up, epochs, and batch size per GPU.
RECIPES = {
    'dvt-t2t-12_8xb128_in1k.py': (2e-3, 0.03, 20, 310, 128),
    'dvt-t2t-14_8xb64_in1k.py': (5e-4, 0.05, 20, 310, 64),
    'dvt-deit-s_8xb128_in1k.py': (1e-3, 0.05, 5, 300, 128),
}


def load(name):
    """Reads a config and removes its pretrained checkpoint."""
    cfg = copy.deepcopy(read(ROOT / name))
    init_default_scope(cfg.default_scope)
    cfg.model.init_cfg = None
    cfg.model.setdefault('data_preprocessor', cfg.data_preprocessor)
    return cfg


def test_the_configs_are_there():
    assert (len(IMAGENET), len(CIFAR), len(NAMES)) == (6, 4, 12)


@pytest.mark.slow
@pytest.mark.parametrize('name', NAMES)
def test_cascade_trains_a_step_and_infers(name):
    from mmpretrain.structures import DataSample

    cfg = load(name)
    model = MODELS.build(cfg.model)
    assert type(model) is DVT
    model.init_weights()
    side = 32 if 'mini' in name else 64
    samples = [DataSample().set_gt_label(i) for i in (1, 7)]
    pictures = [torch.randint(0, 256, (3, side, side), dtype=torch.uint8) for _ in samples]
    step(model, dict(inputs=torch.stack(pictures), data_samples=samples))
    model.eval()
    with torch.no_grad():
        results = model.test_step(dict(inputs=pictures, data_samples=samples))
    exits = len(cfg.model.get('grids', (7, 10, 14)))
    assert [(r.pred_score.shape, r.exit_conf.shape) for r in results] == [((model.num_classes,), (exits,))] * 2
    assert bool([m for m in model.modules() if isinstance(m, DTN)]) == ('-dtn' in name)
    frozen = {name.split('.', 2)[2] for name, p in model.named_parameters() if not p.requires_grad}
    assert frozen == ({'norm.weight', 'norm.bias', 'cls_token'} if name in CIFAR else set())


def rates(cfg, epochs):
    """Returns the learning rate of each parameter group in each epoch."""
    with torch.device('meta'):
        model = MODELS.build(cfg.model)
    wrapper = build_optim_wrapper(model, cfg.optim_wrapper)
    schedulers = [PARAM_SCHEDULERS.build(dict(s, optimizer=wrapper)) for s in cfg.param_scheduler]
    wrapper.optimizer.step = lambda: None
    for _ in range(epochs):
        yield wrapper.get_lr()['lr']
        for scheduler in schedulers:
            scheduler.step()


@pytest.mark.parametrize('name', RECIPES)
def test_the_learning_rate_is_that_of_the_published_runs(name):
    peak, _, warm_up, epochs, _ = RECIPES[name]
    cfg = load(name)
    assert cfg.train_cfg.max_epochs == epochs
    assert all(s.by_epoch and not s.get('convert_to_iter_based') for s in cfg.param_scheduler)
    got = np.array([groups[0] for groups in rates(cfg, epochs)])
    e = np.arange(epochs)
    cosine = 1e-5 + (peak - 1e-5) * (1 + np.cos(math.pi * np.minimum(e, 300) / 300)) / 2
    want = np.where(e < warm_up, 1e-6 + e * (peak - 1e-6) / warm_up, cosine)
    assert np.abs(got - want).max() < 0.02 * peak
    np.testing.assert_allclose(got[warm_up:], want[warm_up:], rtol=0, atol=1e-3 * peak)


@pytest.mark.parametrize('name', IMAGENET)
def test_what_is_decayed(name):
    cfg = load(name)
    with torch.device('meta'):
        model = MODELS.build(cfg.model)
    wrapper = build_optim_wrapper(model, cfg.optim_wrapper)
    decay = {id(p): group['weight_decay'] for group in wrapper.optimizer.param_groups for p in group['params']}
    ours = 'dtn' in name or 'deit' in name  # these have no published recipe
    lr, weight_decay, *_ = RECIPES.get(name, RECIPES[IMAGENET[-2]])
    if name in RECIPES:
        assert (wrapper.optimizer.defaults['lr'], wrapper.optimizer.defaults['weight_decay']) == (lr, weight_decay)
        assert wrapper.optimizer.defaults['betas'] == (0.9, 0.999) and wrapper.clip_grad_kwargs is None
    for key, p in model.named_parameters():
        dtn = key.endswith(('.position', '_mix'))
        spared = p.dim() == 1 or (ours and (dtn or key.endswith(('cls_token', 'pos_embed'))))
        assert (decay[id(p)] == 0) == spared, key


@pytest.mark.parametrize('name', RECIPES)
def test_data_mixing_smoothing_and_moving_average(name, tmp_path):
    cfg = load(name)
    noise = np.random.default_rng(0).integers(0, 255, (240, 300, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / 'a.png')
    pipeline = Compose(cfg.train_dataloader.dataset.pipeline)
    _, choice, flip, augment, erase, _ = pipeline.transforms
    crops = [transforms.transforms[0] for transforms in choice.transforms]
    assert [(c.scale, c.crop_ratio_range, c.interpolation) for c in crops] == [
        ((224, 224), (0.08, 1.0), 'bilinear'),
        ((224, 224), (0.08, 1.0), 'bicubic'),
    ]
    assert (augment.magnitude_level, augment.magnitude_std, augment.num_policies) == (9, 0.5, 2)
    assert (flip.prob, erase.erase_prob, erase.mode) == (0.5, 0.25, 'rand')
    for dataloader in (cfg.train_dataloader, cfg.val_dataloader, cfg.calibration_dataloader):
        run = Compose(dataloader.dataset.pipeline)
        assert run(dict(img_path=str(tmp_path / 'a.png'), gt_label=3))['inputs'].shape == (3, 224, 224)
    assert cfg.train_dataloader.batch_size == RECIPES[name][-1] and cfg.auto_scale_lr.base_batch_size % 8 == 0
    resize, crop = cfg.val_dataloader.dataset.pipeline[1:3]
    assert (resize.scale, resize.interpolation, crop.crop_size) == (256, 'bicubic', 224)
    with torch.device('meta'):
        model = MODELS.build(cfg.model)
    mixes = model.data_preprocessor.batch_augments.augments
    assert {type(mix).__name__: mix.alpha for mix in mixes} == {'Mixup': 0.8, 'CutMix': 1.0}
    loss = model.loss_module
    assert (type(loss).__name__, loss.label_smooth_val, loss.mode) == ('LabelSmoothLoss', 0.1, 'original')
    average = HOOKS.build(cfg.custom_hooks[0])
    assert isinstance(average, EMAHook) and average.ema_cfg['momentum'] == 4e-5
    assert cfg.train_dataloader.sampler.type == ('RepeatAugSampler' if 'deit' in name else 'DefaultSampler')
    assert cfg.default_hooks.checkpoint.save_best == 'accuracy/top1'


@pytest.mark.parametrize('name', CIFAR)
def test_transfer_to_cifar(name):
    cfg = load(name)
    assert cfg.train_dataloader.batch_size == 64 and cfg.train_cfg.max_epochs == 60
    with torch.device('meta'):
        model = MODELS.build(cfg.model)
    wrapper = build_optim_wrapper(model, cfg.optim_wrapper)
    by_id = {id(p): group['lr'] for group in wrapper.optimizer.param_groups for p in group['params']}
    for key, p in model.named_parameters():
        if p.requires_grad:
            assert by_id[id(p)] == pytest.approx(0.05 if '.head.' in key else 5e-4), key
    assert wrapper.optimizer.defaults['momentum'] == 0.9 and wrapper.optimizer.defaults['weight_decay'] == 5e-4
    last = list(rates(cfg, 61))[-1]
    assert max(last) < 2.6e-4 and min(last) == pytest.approx(2e-4, rel=0.01)
    classes = 100 if 'cifar100' in name else 10
    assert model.num_classes == cfg.model.data_preprocessor.num_classes == classes
    assert f'CIFAR{classes}' == cfg.test_dataloader.dataset.type == cfg.calibration_dataloader.dataset.type
    original = read(ROOT / name).model.init_cfg
    assert original.checkpoint.split('/')[1] in [path.removesuffix('.py') for path in IMAGENET]
    picture = np.zeros((32, 32, 3), dtype=np.uint8)
    for dataloader in (cfg.train_dataloader, cfg.val_dataloader, cfg.calibration_dataloader):
        run = Compose(dataloader.dataset.pipeline)
        assert run(dict(img=picture, gt_label=3))['inputs'].shape == (3, 224, 224)


def test_readme_and_metafile_list_every_config():
    readme = (ROOT / 'README.md').read_text()
    assert all(f'({name})' in readme for name in NAMES)
    models = yaml.safe_load((ROOT / 'metafile.yml').read_text())['Models']
    assert sorted(Path(m['Config']).name for m in models) == NAMES
    assert all('Results' not in m for m in models)
