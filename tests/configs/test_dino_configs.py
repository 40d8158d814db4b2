"""The published recipe of DINO, read off what the configs build: optimizer, schedules, views, model."""

import copy
import math
import uuid
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from mmengine.dataset import Compose
from mmengine.hooks import ParamSchedulerHook
from mmengine.registry import MODELS
from mmengine.runner import Runner
from PIL import Image

from mmdtn.models import read_config
from mmdtn.norms import DTN
from mmdtn.selfsup import DINOHook

from .helpers import read

CONFIGS = Path(__file__).parents[2] / 'configs' / 'dino'
PRE_TRAINING = sorted(CONFIGS.glob('dino_*_in1k.py'))
EPOCH = 3  # batches


class Pictures:
    """Stands in for ImageNet: all pictures are one file."""

    path = ''

    def __init__(self, pipeline, **kwargs):
        self.pipeline = Compose(pipeline)

    def __len__(self):
        return 64 * EPOCH + 1

    def __getitem__(self, index):
        return self.pipeline(dict(img_path=self.path, gt_label=0))


@pytest.fixture(scope='module')
def runner(tmp_path_factory):
    folder = tmp_path_factory.mktemp('dino')
    noise = np.random.default_rng(0).integers(0, 255, (240, 300, 3), dtype=np.uint8)
    Image.fromarray(noise).save(folder / 'a.png')
    Pictures.path = str(folder / 'a.png')
    cfg = read_config(CONFIGS / 'dino_vit-s-star-dtn_8xb64-100e_in1k.py')
    cfg.model.head.out_channels = 16
    cfg.train_dataloader.dataset.type = Pictures
    cfg.train_dataloader.update(num_workers=0, persistent_workers=False)
    cfg.merge_from_dict(dict(work_dir=str(folder), log_level='ERROR', experiment_name=uuid.uuid4().hex))
    runner = Runner.from_cfg(cfg)
    runner._train_loop = runner.build_train_loop(cfg.train_cfg)  # else built by train(), which goes on to train
    runner.optim_wrapper = runner.build_optim_wrapper(cfg.optim_wrapper)
    runner.param_schedulers = runner.build_param_scheduler(cfg.param_scheduler)
    return runner


def test_matrices_decay_but_for_those_of_dtn(runner):
    groups = runner.optim_wrapper.optimizer.param_groups
    assert type(runner.optim_wrapper.optimizer) is torch.optim.AdamW and {g['lr'] for g in groups} == {1e-9}
    decay = {id(p): group['weight_decay'] for group in groups for p in group['params']}
    of_dtn = {id(p) for m in runner.model.modules() if isinstance(m, DTN) for p in m.parameters()}
    assert of_dtn and len(runner.optim_wrapper.optimizer.param_groups) == len(decay)
    for name, p in runner.model.named_parameters():
        if p.requires_grad:
            assert decay.pop(id(p)) == (0 if p.dim() == 1 or id(p) in of_dtn else 0.04), name
        else:
            assert name.startswith('teacher.') or name.endswith('original0'), name
    assert decay == {}
    assert [h.clip_grad for h in runner.hooks if isinstance(h, DINOHook)] == [3.0]


def cosine(first, last, steps):
    """As the published code writes it."""
    return [last + 0.5 * (first - last) * (1 + math.cos(math.pi * i / steps)) for i in range(steps)]


def test_the_schedules_are_the_published_ones(runner):
    """Warm-up from 0 over 10 epochs by iteration, and a weight decay that rises."""
    steps, warm_up = 100 * EPOCH, 10 * EPOCH
    assert len(runner.train_dataloader) == EPOCH and runner.max_iters == steps
    runner.optim_wrapper.step()  # the schedulers want to have seen one
    schedule, rates, decays = ParamSchedulerHook(), [], []
    for _ in range(100):
        for i in range(EPOCH):
            groups = runner.optim_wrapper.optimizer.param_groups
            rates.append({group['lr'] for group in groups})
            decays.append(sorted({group['weight_decay'] for group in groups}))
            schedule.after_train_iter(runner, i)
        schedule.after_train_epoch(runner)
    assert all(len(each) == 1 for each in rates)
    published = [*np.linspace(0, 1e-3, warm_up), *cosine(1e-3, 1e-6, steps - warm_up)]
    np.testing.assert_allclose([each.pop() for each in rates], published, rtol=1e-6, atol=2e-9)
    assert {each[0] for each in decays} == {0}
    np.testing.assert_allclose([each[1] for each in decays], cosine(0.04, 0.4, steps), rtol=1e-6)
    final = {group['weight_decay'] for group in runner.optim_wrapper.optimizer.param_groups}
    assert sorted(final) == pytest.approx([0, 0.4], abs=2e-5)


def test_views_are_the_published_ones(runner):
    loader = runner.train_dataloader
    assert loader.batch_size == 64 and runner.auto_scale_lr['base_batch_size'] == 512 and not runner.cfg.get('amp')
    sample = loader.dataset[0]['inputs']
    assert [tuple(view.shape) for view in sample] == [(3, 224, 224)] * 2 + [(3, 96, 96)] * 8
    views = loader.dataset.pipeline.transforms[2]
    assert views.num_views == [1, 1, 8]
    probabilities = []
    for pipeline, scale in zip(views.pipelines, [(0.4, 1.0), (0.4, 1.0), (0.05, 0.4)], strict=True):
        crop, flip, jitter, grey, _, blur, *more = pipeline.transforms
        assert tuple(crop.t.scale) == scale and crop.t.interpolation.value == 'bicubic' and flip.t.p == 0.5
        (colour,) = jitter.transforms.transforms
        assert jitter.prob == 0.8 and grey.t.p == 0.2
        assert [tuple(getattr(colour.t, name)) for name in ('brightness', 'contrast', 'saturation', 'hue')] == [
            (0.6, 1.4), (0.6, 1.4), (0.8, 1.2), (-0.1, 0.1)
        ]  # fmt: skip
        assert blur.magnitude_range == (0.1, 2.0)
        probabilities.append((blur.prob, [(each.thr, each.prob) for each in more]))
    assert probabilities == [(1.0, []), (0.1, [(128, 0.2)]), (0.5, [])]
    radii = [blur.random_magnitude() for _ in range(300)]
    assert 0.1 <= min(radii) < 0.3 and 1.8 < max(radii) <= 2.0


def test_colours_stay_in_the_order_of_all_other_images(runner):
    """Blue of a BGR image is blue of a view: the crop is the whole image, without any colour transform."""
    pipeline = copy.deepcopy(runner.train_dataloader.dataset.pipeline)
    load, to_pil, views, pack = pipeline.transforms
    crop, *_, to_numpy, _ = views.pipelines[0].transforms
    image = np.zeros((64, 64, 3), dtype=np.uint8)
    image[..., 0] = 200  # blue
    results = to_numpy(crop(to_pil(dict(img=image))))
    assert results['img'][..., 0].min() == 200 and not results['img'][..., 1:].any() and load and pack


@pytest.mark.parametrize('path', [*PRE_TRAINING, *sorted(CONFIGS.glob('linear*'))], ids=lambda path: path.stem)
def test_backbone_and_head_fit(path):
    cfg = read_config(path)
    cfg.model.backbone.init_cfg = None
    with torch.device('meta'):
        model = MODELS.build(cfg.model)
        backbone = model.student.backbone if 'student' in dict(model.named_children()) else model.backbone
        assert any(isinstance(m, DTN) for m in backbone.modules()) == ('-dtn' in path.name)
        if model is not backbone and hasattr(model, 'student'):
            views = [torch.zeros(1, 3, side, side) for side in (224, 224, 96)]
            assert model.student(views).shape == (3, 1, 65536)


@pytest.mark.parametrize('name', ['dino_vit-s-star-dtn_8xb64-100e_in1k', 'dino_vit-mini-dtn_cifar10'])
def test_twins_differ_in_the_normaliser_alone(name):
    with_dtn, with_ln = (copy.deepcopy(read(CONFIGS / f'{n}.py')) for n in (name, name.replace('-dtn', '')))
    assert with_dtn.model.backbone.pop('norm_cfg') == dict(type='DTN')
    assert with_ln.model.backbone.pop('norm_cfg') == dict(type='LN')
    assert with_dtn.to_dict() == with_ln.to_dict()


def test_readme_and_metafile_name_all_configs():
    names = {path.stem for path in CONFIGS.glob('*.py')}
    models = yaml.safe_load((CONFIGS / 'metafile.yml').read_text())['Models']
    assert {m['Name'] for m in models} == names
    readme = (CONFIGS / 'README.md').read_text()
    assert all(f'{name}.py' in readme for name in names)
