"""Compares loss, centre, teacher and gradients of DINO with the definition and with numbers computed by hand."""

import copy
import math

import numpy as np
import pytest
import torch
from scipy.special import log_softmax, softmax
from torch import nn

from mmdtn.selfsup import DINOHead, TeacherEMA, dino_loss

from .small import HEAD, dino, views


def by_definition(student, teacher, centre, student_temp, teacher_temp):
    """Computes the loss in a loop over all pairs of different views."""
    terms = []
    for i, of_teacher in enumerate(teacher):
        for v, of_student in enumerate(student):
            if v != i:
                q, log_p = softmax((of_teacher - centre) / teacher_temp, -1), log_softmax(of_student / student_temp, -1)
                terms.append(np.mean([-np.sum(a * b) for a, b in zip(q, log_p, strict=True)]))
    return terms


def test_the_loss_and_the_centre_of_one_image_by_hand():
    student = torch.tensor([[[0.1 * math.log(3), 0]], [[0, 0]], [[0, 0.1 * math.log(4)]]], dtype=torch.float64)
    teacher = torch.tensor([[[0.04 + 0.04 * math.log(3), 0]], [[0.04, 0]]], dtype=torch.float64)
    centre = torch.tensor([0.04, 0], dtype=torch.float64)
    terms = by_definition(student.numpy(), teacher.numpy(), centre.numpy(), 0.1, 0.04)
    assert terms == pytest.approx([0.693147, 1.262864, 0.836988, 0.916291], abs=1e-6)
    assert dino_loss(student, teacher, centre).loss.item() == pytest.approx(0.927323, abs=1e-6)
    model = dino(head=dict(HEAD, out_channels=2)).double()
    model.centre.copy_(centre)
    model.move_centre(teacher)
    torch.testing.assert_close(model.centre, torch.tensor([0.042197, 0], dtype=torch.float64), atol=1e-6, rtol=0)


@pytest.mark.parametrize(('number', 'images', 'temp'), [(2, 1, 0.04), (5, 3, 0.07), (10, 4, 0.04)])
def test_the_loss_is_its_definition_to_the_last_digits(number, images, temp):
    student = torch.randn(number, images, 7, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(2, images, 7, dtype=torch.float64, requires_grad=True)
    centre = torch.randn(7, dtype=torch.float64)
    found = dino_loss(student, teacher, centre, 0.1, temp)
    want = by_definition(student.detach().numpy(), teacher.detach().numpy(), centre.numpy(), 0.1, temp)
    assert found.loss.item() == pytest.approx(np.mean(want), rel=1e-12)
    q = softmax((teacher.detach().numpy() - centre.numpy()) / temp, -1)
    assert found.teacher_entropy.item() == pytest.approx(-(q * np.log(q)).sum(-1).mean(), rel=1e-12)
    found.loss.backward()
    assert teacher.grad is None
    p = softmax(student.detach().numpy() / 0.1, -1)
    gradient = np.zeros_like(p)  # of cross-entropy with respect to logits: p - q
    for i in range(2):
        for v in range(number):
            gradient[v] += (v != i) * (p[v] - q[i]) / 0.1 / images / (2 * (number - 1))
    np.testing.assert_allclose(student.grad.numpy(), gradient, rtol=1e-12, atol=1e-12)


def test_half_precision_is_summed_in_float32():
    student, teacher, centre = torch.randn(3, 4, 5000), torch.randn(2, 4, 5000), torch.zeros(5000)
    student, teacher = student.bfloat16(), teacher.bfloat16()
    with torch.autocast('cpu', torch.bfloat16):
        found = dino_loss(student, teacher, centre)
    want = dino_loss(student.double(), teacher.double(), centre.double())
    assert found.loss.dtype == torch.float32
    torch.testing.assert_close(found.loss.double(), want.loss, rtol=1e-5, atol=0)


def test_a_step_reaches_the_student_alone_and_moves_the_centre_after_the_loss():
    model = dino()
    seen = views()
    with torch.no_grad():
        teacher = model.teacher(seen[:2])
        vectors = torch.cat([model.student.backbone(view)[0] for view in seen])
        student = model.student.head(vectors).view(4, 3, -1)
    losses = model(seen, mode='loss')
    want = dino_loss(student, teacher, torch.zeros(12))
    torch.testing.assert_close(losses['loss'], want.loss)
    torch.testing.assert_close(losses['kl'], want.loss - want.teacher_entropy)
    torch.testing.assert_close(model.centre, 0.1 * teacher.mean((0, 1)))
    torch.testing.assert_close(losses['centre_norm'], model.centre.norm())
    loss, shown = model.parse_losses(losses)
    assert loss == shown['loss'] == want.loss and {'teacher_entropy', 'kl', 'centre_norm'} < shown.keys()
    loss.backward()
    gain = 'student.head.last_layer.parametrizations.weight.original0'
    for name, parameter in model.named_parameters():
        assert (parameter.grad is None) == (name.startswith('teacher.') or name == gain), name
    before = model.centre.clone()
    model.eval()(seen, mode='loss')
    assert torch.equal(model.centre, before)


def test_views_of_one_size_go_through_the_backbone_together():
    model = dino()
    shapes = []
    model.student.backbone.register_forward_pre_hook(lambda _, args: shapes.append(tuple(args[0].shape)))
    heads = []
    model.student.head.register_forward_pre_hook(lambda _, args: heads.append(len(args[0])))
    model(views(images=3, local=4), mode='loss')
    assert shapes == [(6, 3, 16, 16), (12, 3, 8, 8)] and heads == [18]


@pytest.mark.parametrize('inputs', [torch.zeros(2, 3, 16, 16), [torch.zeros(2, 3, 16, 16)]])
def test_one_view_is_refused(inputs):
    with pytest.raises(ValueError, match='MultiView'):
        dino()(inputs, mode='loss')


def test_the_teacher_follows_the_cosine():
    student, one = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
    nn.init.zeros_(student.weight)
    nn.init.ones_(one.weight)
    teacher = TeacherEMA(one, momentum=0.5)
    teacher.total_steps = 4
    found = []
    for _ in range(4):
        teacher.update_parameters(student)
        found.append(teacher.module.weight.item())
    assert found == pytest.approx([0.5, 0.286612, 0.214959, 0.199219], abs=1e-6)
    assert teacher.steps == 4


def test_the_teacher_starts_as_the_student_and_has_no_stochastic_depth():

    model = dino(
        backbone=dict(type='ViTDTN', arch='t', img_size=32, dtn_layers=2, drop_path_rate=0.9),
        head=dict(HEAD, in_channels=192),
    )
    assert not model.teacher.training and not any(m.training for m in model.teacher.modules())
    for (name, mine), theirs in zip(model.student.named_parameters(), model.teacher.module.parameters(), strict=True):
        assert torch.equal(mine, theirs) and mine is not theirs and not theirs.requires_grad, name
    seen = [torch.randn(2, 3, 32, 32)] * 2
    assert torch.equal(model.teacher(seen), model.teacher(seen))
    assert not torch.equal(model.student(seen)[0], model.student(seen)[1])


def test_gain_and_direction_of_the_last_layer_average_apart():
    model = dino(head=dict(HEAD, norm_last_layer=False))
    model.teacher.total_steps = 10
    start = copy.deepcopy(model.teacher.module.head.last_layer.state_dict())
    with torch.no_grad():
        for parameter in model.student.head.last_layer.parameters():
            parameter.mul_(3)
    model.teacher.update_parameters(model.student)
    for name, value in model.teacher.module.head.last_layer.state_dict().items():
        torch.testing.assert_close(value, start[name] * (0.996 + 3 * 0.004))
    assert all(p.requires_grad for p in model.student.head.parameters())


def test_the_head_loads_published_weights():
    """Checkpoints contain the parameter names of torch's older weight normalisation."""
    head = DINOHead(16, 12, 20, 8)
    old = nn.utils.weight_norm(nn.Linear(8, 12, bias=False))
    state = {key: value for key, value in head.state_dict().items() if key.startswith('mlp.')}
    state |= {f'last_layer.{key}': value for key, value in old.state_dict().items()}
    assert {'last_layer.weight_g', 'last_layer.weight_v'} < state.keys()
    head.load_state_dict(state)
    x = torch.randn(5, 16)
    want = old(nn.functional.normalize(head.mlp(x), dim=-1))
    torch.testing.assert_close(head(x), want)
    copy.deepcopy(head)  # after a forward pass


def test_the_start_of_the_head():
    head = DINOHead(384)
    assert [tuple(layer.weight.shape) for layer in head.mlp if isinstance(layer, nn.Linear)] == [
        (2048, 384), (2048, 2048), (256, 2048)
    ]  # fmt: skip
    assert head.last_layer.weight.shape == (65536, 256)
    assert head.mlp[2].weight.std().item() == pytest.approx(0.02, rel=0.05) and not head.mlp[2].bias.any()
    torch.testing.assert_close(head.last_layer.weight.norm(dim=1), torch.ones(65536))


def test_what_is_used_after_training_is_the_teachers_backbone():
    model = dino()
    with torch.no_grad():
        for parameter in model.teacher.module.backbone.parameters():
            parameter.add_(0.1)
    x = torch.randn(2, 3, 16, 16)
    assert torch.equal(model(x)[0], model.teacher.module.backbone(x)[0])
    assert not torch.equal(model(x)[0], model.student.backbone(x)[0])
