"""Tests the training of DINO: gradients, teacher updates, schedules, resuming and several processes."""

import copy
import math
import uuid
from itertools import pairwise

import pytest
import torch
from mmengine.hooks import Hook
from mmengine.runner import Runner

from mmdtn.engine.hooks import WholeCheckpointHook
from mmdtn.errors import UserError
from mmdtn.norms import DTN
from mmdtn.selfsup import DINOHook
from tests.training import in_two_processes
from tools.train import main as train_by_config

from .small import BACKBONE, HEAD, Views

LAST = 'student.head.last_layer.parametrizations.weight.original1'
DECAY = dict(norm_decay_mult=0.0, bias_decay_mult=0.0, flat_decay_mult=0.0, custom_keys={'.norm': dict(decay_mult=0.0)})


CONFIG = """
custom_imports = dict(imports=['mmdtn', 'tests.selfsup.small'])
model = dict(type='DINO', backbone={backbone}, head={head}, data_preprocessor=dict(type='AsTheyAre'))
train_dataloader = dict(dataset=dict(type='Views', length=8), sampler=dict(type='DefaultSampler', shuffle=True),
                        batch_size=2, num_workers=0, collate_fn=dict(type='default_collate'))
train_cfg = dict(type='ResumableLoop', max_epochs=2)
optim_wrapper = dict(optimizer=dict(type='SGD', lr=0.1, momentum=0.9, weight_decay=0.01))
custom_hooks = [dict(type='DINOHook')]
default_hooks = dict(logger=dict(type='LoggerHook', interval=1))
randomness = dict(seed=3)
log_level = 'ERROR'
"""


class Watch(Hook):
    """Hook that records a function of the runner after each iteration."""

    priority = 'LOWEST'

    def __init__(self, function):
        self.function, self.seen = function, []

    def after_train_iter(self, runner, *args, **kwargs):
        self.seen.append(self.function(runner))


def train(
    work_dir,
    images=8,
    batch=2,
    hook=None,
    watch=lambda _: None,
    loop=None,
    load_from=None,
    resume=True,
    more=(),
    **optim_wrapper,
):
    """Trains for some epochs of ``images / batch`` steps. Returns the runner and the recorded values."""
    wrapper = dict(optimizer=dict(type='AdamW', lr=0.01, weight_decay=0.5), paramwise_cfg=DECAY) | optim_wrapper
    watching = Watch(watch)
    runner = Runner(
        dict(type='DINO', backbone=BACKBONE, head=HEAD, teacher_momentum=0.9, data_preprocessor=dict(type='AsTheyAre')),
        str(work_dir),
        train_dataloader=dict(
            dataset=Views(images),
            sampler=dict(type='DefaultSampler', shuffle=True),
            batch_size=batch,
            collate_fn=dict(type='default_collate'),
        ),
        train_cfg=loop or dict(type='ResumableLoop', max_epochs=2),
        optim_wrapper=wrapper,
        default_hooks=dict(checkpoint=WholeCheckpointHook(interval=3, by_epoch=False)),
        custom_hooks=[hook or DINOHook(), watching, *more],
        load_from=load_from,
        resume=resume and load_from is not None,
        randomness=dict(seed=5),
        log_level='ERROR',
        experiment_name=uuid.uuid4().hex,
        cfg=dict(work_dir=str(work_dir), optim_wrapper=wrapper),
    )
    runner.train()
    return runner, watching.seen


def test_the_last_layer_stays_for_an_epoch_and_its_weights_do_not_decay(tmp_path):
    def layers(runner):
        parameters = dict(runner.model.named_parameters())
        return [parameters[name].detach().clone() for name in (LAST, 'student.head.mlp.0.weight')]

    _, seen = train(tmp_path, watch=layers)
    still = [torch.equal(one[0], other[0]) for one, other in pairwise(seen)]
    assert still == [True, True, True, False, False, False, False]  # four steps an epoch
    assert not any(torch.equal(one[1], other[1]) for one, other in pairwise(seen))
    started = torch.load(tmp_path / 'iter_3.pth', weights_only=False)
    assert torch.equal(started['state_dict'][LAST], seen[0][0])
    # By iterations, where mmengine counts no epochs.
    loop = dict(type='ResumableLoop', max_iters=8, val_interval=100)
    _, again = train(tmp_path / 'iters', watch=layers, loop=loop)
    assert all(
        torch.equal(a, b) for one, other in zip(seen, again, strict=True) for a, b in zip(one, other, strict=True)
    )


def test_each_gradient_is_clipped_by_itself(tmp_path):
    norms = {}

    class Gradients(DINOHook):
        def prepare_gradients(self, *args):
            first, second, third, *_ = self.model.student.backbone.blocks[0].attn.parameters()
            for parameter, norm in ((first, 6.0), (second, 1.0), (third, 3.0)):
                parameter.grad.mul_(norm / parameter.grad.norm())
            super().prepare_gradients(*args)
            norms.setdefault('found', [p.grad.norm().item() for p in (first, second, third)])

    train(tmp_path, hook=Gradients(frozen_last_layer=0), loop=dict(type='ResumableLoop', max_iters=1))
    assert norms['found'] == pytest.approx([3, 1, 3], abs=1e-5)


@pytest.mark.parametrize('clip', [0, -1.0])
def test_a_limit_of_gradients_is_positive(clip):
    with pytest.raises(ValueError, match='clip_grad'):
        DINOHook(clip_grad=clip)


def test_the_teacher_moves_once_a_step_along_the_whole_training(tmp_path):
    expected = {}

    def check(runner):
        model = runner.model
        step = runner.iter
        momentum = 1 - 0.1 * (1 + math.cos(math.pi * step / 8)) / 2
        for name, value in model.teacher.module.named_parameters():
            student = dict(model.student.named_parameters())[name].detach()
            if name in expected:
                want = momentum * expected[name] + (1 - momentum) * student
                torch.testing.assert_close(value, want, rtol=1e-5, atol=1e-7)
            expected[name] = value.detach().clone()
        return int(model.teacher.steps)

    assert train(tmp_path, watch=check)[1] == list(range(1, 9))


def test_accumulated_gradients_are_one_step_of_the_teacher(tmp_path):
    runner, seen = train(tmp_path, watch=lambda r: int(r.model.teacher.steps), accumulative_counts=3)
    assert seen == [0, 0, 1, 1, 1, 2, 2, 3] and runner.model.teacher.total_steps == 3


def test_the_temperature_rises_by_epochs(tmp_path):
    hook = DINOHook(warmup_temp=0.02, warmup_epochs=3)
    loop = dict(type='ResumableLoop', max_epochs=4)
    runner, seen = train(tmp_path, images=4, hook=hook, watch=lambda r: r.model.teacher_temp, loop=loop)
    assert seen == pytest.approx([0.02] * 2 + [0.03] * 2 + [0.04] * 4)
    assert runner.model.teacher_temp == 0.04


def test_a_killed_training_goes_on_with_the_same_teacher(tmp_path):
    loop = dict(type='ResumableLoop', max_iters=7, val_interval=100)
    whole, _ = train(tmp_path / 'whole', loop=loop)
    resumed, seen = train(tmp_path / 'resumed', loop=loop, load_from=str(tmp_path / 'whole' / 'iter_3.pth'))
    assert len(seen) == 4
    states = whole.model.state_dict(), resumed.model.state_dict()
    assert {'centre', 'teacher.steps', 'teacher.module.backbone.pos_embed'} < states[0].keys()
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name]), name


def test_eight_steps_are_those_of_a_plain_loop(tmp_path):
    """Compares with explicit formulas for loss, clipping, centre, teacher and frozen layer, in float64."""
    batches = []

    class Batches(Hook):
        def before_train_iter(self, runner, batch_idx, data_batch=None):
            batches.append([view.clone() for view in data_batch['inputs']])

    hook = DINOHook(clip_grad=0.05, warmup_temp=0.03, warmup_epochs=2)
    torch.set_default_dtype(torch.float64)
    try:
        start = train(tmp_path / 'start', loop=dict(type='ResumableLoop', max_iters=0))[0].model
        student, teacher = copy.deepcopy(start.student), copy.deepcopy(start.student)
        runner, _ = train(tmp_path / 'run', hook=hook, more=[Batches()])
    finally:
        torch.set_default_dtype(torch.float32)
    centre = torch.zeros(12, dtype=torch.float64)
    spared = {id(p) for m in student.modules() if isinstance(m, DTN) for p in m.parameters()}
    parameters = [p for p in student.parameters() if p.requires_grad]
    groups = [dict(params=[p], weight_decay=0.0 if p.dim() == 1 or id(p) in spared else 0.5) for p in parameters]
    optimizer = torch.optim.AdamW(groups, lr=0.01)

    def outputs(model, some):
        return [model.head(model.backbone(view)[0]) for view in some]

    for step, seen in enumerate(batches):
        of_student = outputs(student, seen)
        with torch.no_grad():
            of_teacher = outputs(teacher, seen[:2])
        temp = 0.03 if step < 4 else 0.04
        terms = [
            -(((t - centre) / temp).softmax(-1) * (s / 0.1).log_softmax(-1)).sum(-1).mean()
            for i, t in enumerate(of_teacher)
            for v, s in enumerate(of_student)
            if v != i
        ]
        optimizer.zero_grad()
        torch.stack(terms).mean().backward()
        centre = 0.9 * centre + 0.1 * torch.cat(of_teacher).mean(0)
        for parameter in parameters:
            norm = parameter.grad.norm()
            if norm > 0.05:
                parameter.grad.mul_(0.05 / (norm + 1e-6))
        if step < 4:
            for parameter in student.head.last_layer.parameters():
                parameter.grad = None
        optimizer.step()
        momentum = 1 - 0.1 * (math.cos(math.pi * step / 8) + 1) / 2
        with torch.no_grad():
            for mine, theirs in zip(teacher.parameters(), student.parameters(), strict=True):
                mine.mul_(momentum).add_((1 - momentum) * theirs)
    assert len(batches) == 8
    torch.testing.assert_close(runner.model.centre, centre, rtol=1e-9, atol=1e-12)
    for found, want in ((runner.model.student, student), (runner.model.teacher.module, teacher)):
        for (name, mine), theirs in zip(found.named_parameters(), want.parameters(), strict=True):
            # Adam divides by the size of a gradient, so that round-off of a small one shows.
            torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7, msg=name)


def test_half_precision_on_a_cpu(tmp_path):
    """Uses mixed precision as with `--amp`."""

    def loss(runner):
        return runner.message_hub.get_scalar('train/loss').current()

    _, seen = train(tmp_path, watch=loss, type='BFloat16OptimWrapper')
    assert len(seen) == 8 and all(map(math.isfinite, seen))


def test_weights_of_another_training_start_the_schedule_anew(tmp_path):
    loop = dict(type='ResumableLoop', max_iters=3, val_interval=100)
    before, _ = train(tmp_path / 'before', loop=loop)
    file = str(tmp_path / 'before' / 'iter_3.pth')
    _, seen = train(
        tmp_path / 'after', loop=loop, load_from=file, resume=False, watch=lambda r: int(r.model.teacher.steps)
    )
    assert before.model.teacher.steps == 3 and seen == [1, 2, 3]


def test_the_log_shows_a_collapse(tmp_path):
    runner, _ = train(tmp_path)
    scalars = runner.message_hub.log_scalars
    assert {'train/loss', 'train/teacher_entropy', 'train/kl', 'train/centre_norm'} < scalars.keys()
    history = [scalars[f'train/{name}'].data[0] for name in ('loss', 'kl', 'teacher_entropy')]
    assert history[0] == pytest.approx(history[1] + history[2])
    assert all(0 <= entropy <= math.log(12) for entropy in history[2])


def test_the_hook_is_for_dino(tmp_path):
    from tests.engine.toy import train as train_toy

    with pytest.raises(UserError, match='Toy'):
        train_toy(tmp_path, hooks=[DINOHook()])


@pytest.mark.slow
def test_two_processes_are_one(tmp_path):
    """Uses SGD, because Adam turns rounding errors of zero gradients into full steps."""
    config = tmp_path / 'config.py'
    config.write_text(CONFIG.format(backbone=BACKBONE, head=HEAD))
    assert in_two_processes(train_by_config, config, '--work-dir', tmp_path / 'two', cwd=tmp_path) == [0, 0]
    train_by_config(
        [str(config), '--work-dir', str(tmp_path / 'one'), '--cfg-options', 'train_dataloader.batch_size=4']
    )
    one, two = (torch.load(tmp_path / name / 'epoch_2.pth', weights_only=False) for name in ('one', 'two'))
    logs = [checkpoint['message_hub']['log_scalars'] for checkpoint in (one, two)]
    centres = [log['train/centre_norm'].data[0] for log in logs]
    assert len(centres[0]) == 4 and centres[0] == pytest.approx(centres[1], rel=1e-5)
    assert one['state_dict']['centre'].any()
    for name, value in one['state_dict'].items():
        torch.testing.assert_close(two['state_dict'][name], value, rtol=1e-4, atol=1e-5, msg=name)
