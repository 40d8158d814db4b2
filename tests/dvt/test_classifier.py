"""DVT as a classifier of MMPretrain: losses, predictions, early exit and training."""

import pytest
import torch
import torch.nn.functional as F
from mmengine.optim import build_optim_wrapper
from mmengine.registry import MODELS
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from mmdtn.backbones.t2t import sines
from mmdtn.dvt import DVT

from .small import ARCHS, drawn, images, samples, small

FAMILIES = list(ARCHS)
SMOOTHED = dict(type='mmpretrain.LabelSmoothLoss', label_smooth_val=0.1, mode='original')


@pytest.mark.parametrize('scope', ['mmengine', 'mmpretrain', 'mmdet'])
def test_it_is_found_in_any_scope(scope):
    assert type(MODELS.build(dict(ARCHS['deit'], type='DVT', _scope_=scope))) is DVT


@pytest.mark.parametrize('mixed', [False, True])
@pytest.mark.parametrize(('loss', 'smoothing'), [(None, 0.0), (SMOOTHED, 0.1)])
def test_the_loss_is_the_cross_entropy_of_each_exit(loss, smoothing, mixed):
    model = drawn(loss=loss, loss_weights=[1.0, 0.5, 2.0])
    x, truth = images(number=4), samples(4, mixed)
    losses = model(x, truth, mode='loss')
    target = torch.stack([s.gt_score for s in truth]) if mixed else torch.cat([s.gt_label for s in truth])
    for (name, got), logits, weight, k in zip(losses.items(), model(x), (1, 0.5, 2), (1, 2, 3), strict=True):
        assert name == f'exit{k}_loss'
        torch.testing.assert_close(got, weight * F.cross_entropy(logits, target, label_smoothing=smoothing))
    total, _ = model.parse_losses(losses)
    torch.testing.assert_close(total, sum(losses.values()))


@torch.no_grad()
def test_predictions_without_thresholds_are_of_all_exits():
    model, x = drawn(), images(number=3)
    logits = torch.stack(model(x), 1).softmax(-1)
    truth = samples(3)
    predicted = model(x, truth, mode='predict')
    assert all(a is b for a, b in zip(predicted, truth, strict=True)), 'with what the data samples hold'
    for sample, scores in zip(predicted, logits, strict=True):
        torch.testing.assert_close(sample.pred_score, scores[-1])
        assert sample.pred_label.tolist() == [scores[-1].argmax()] and sample.exit == 3
        torch.testing.assert_close(sample.exit_conf, scores.amax(-1))
        assert sample.exit_label.tolist() == scores.argmax(-1).tolist()
    assert model(x, mode='predict')[0].pred_label == predicted[0].pred_label


def chosen_afterwards(model, x):
    scores = torch.stack(model(x), 1).softmax(-1)
    leaves = scores.amax(-1) >= torch.tensor([*model.thresholds, 0.0])
    exits = leaves.int().argmax(1)
    return scores[torch.arange(len(x)), exits], exits + 1


def gaps(model, x):
    """Returns thresholds halfway between the probabilities of each exit, so that rounding cannot matter."""
    for conf in torch.stack([logits.softmax(-1).amax(-1) for logits in model(x, exits=2)]):
        ordered = conf.sort().values
        yield [0.0, *((ordered[1:] + ordered[:-1]) / 2).tolist(), 2.0]


@pytest.mark.parametrize('family', FAMILIES)
@pytest.mark.parametrize('number', [1, 6])
@torch.no_grad()
def test_leaving_early_is_choosing_afterwards(family, number):
    model, x = drawn(family), images(family, number)
    first, second = gaps(model, x)
    thin = 1 if number == 1 else 2
    seen = set()
    for pair in [(a, b) for a in first[::thin] for b in second[::thin]]:
        model.thresholds = pair
        want, exits = chosen_afterwards(model, x)
        predicted = model(x, samples(number), mode='predict')
        assert [s.exit for s in predicted] == exits.tolist()
        torch.testing.assert_close(torch.stack([s.pred_score for s in predicted]), want, rtol=1e-4, atol=1e-6)
        seen |= {tuple(sorted(exits.tolist()))}
    everywhere = {tuple([k] * number) for k in (1, 2, 3)}
    assert everywhere <= seen and (number == 1 or any(len(set(mix)) == 3 for mix in seen))


@torch.no_grad()
def test_later_exits_run_for_those_alone_that_need_them():
    model, x = drawn(thresholds=[0.0, 0.0]), images(number=6)
    ran = []
    for exit in model.exits:
        exit.stem.register_forward_hook(lambda module, inputs, output: ran.append(len(output)))
    model(x, mode='predict')
    assert ran == [6]
    first = model(x, exits=1)[0].softmax(-1).amax(-1).sort().values
    ran.clear()
    model.thresholds = ((first[1] + first[2]).item() / 2, 2.0)
    model(x, mode='predict')
    assert ran == [6, 2, 2]


@pytest.mark.parametrize('norm', ['LN', 'DyT', 'RMSNorm', 'GN'])
@pytest.mark.parametrize('family', FAMILIES)
def test_every_parameter_is_used(family, norm):
    model = small(family, norm_cfg=dict(type=norm))
    model.init_weights()
    losses = model(images(family), samples(2), mode='loss')
    sum(losses.values()).backward()
    assert [n for n, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()] == []


def test_weights_start_as_published_and_nothing_starts_at_zero():
    torch.manual_seed(0)
    model = small('deit')
    model.init_weights()
    for name, p in model.named_parameters():
        if isinstance(model.get_submodule(name.rpartition('.')[0]), nn.LayerNorm):
            assert (p == (1 if name.endswith('weight') else 0)).all()
        elif name.endswith(('cls_token', 'pos_embed')) or (p.dim() == 2 and 'stem' not in name):
            assert 0.015 < p.std() < 0.025 and p.abs().max() < 0.12, name
        elif '.conv' in name or '.stem.' in name:
            assert p.abs().max() <= p[0].numel() ** -0.5 or p.dim() == 1, "torch's own start"
            assert p.std() > 0
        else:
            assert name.endswith('.bias') and (p == 0).all(), name


@pytest.mark.parametrize('family', FAMILIES)
def test_a_step_moves_what_is_learned_and_nothing_else(family):
    model = small(family).train()
    model.init_weights()
    before = {name: t.clone() for name, t in [*model.named_parameters(), *model.named_buffers()]}
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    sum(model(images(family), samples(2), mode='loss').values()).backward()
    optimizer.step()
    still = {name for name, t in [*model.named_parameters(), *model.named_buffers()] if torch.equal(t, before[name])}
    # Nothing reads the image tokens of the last block, and the class token is joined with zeros.
    fixed = {f'exits.2.blocks.1.features.{n}.{p}' for n in ('norm', 'mlp.fc1', 'mlp.fc2') for p in ('weight', 'bias')}
    if family == 't2t':
        fixed |= {f'exits.{k}.pos_embed' for k in range(3)}
        fixed |= {f'exits.{k}.stem.attention{i}.features' for k in range(3) for i in (1, 2)}
    assert still == fixed
    if family == 't2t':
        assert torch.equal(model.exits[2].pos_embed[0], sines(17, 48))


@torch.no_grad()
def test_dropout_is_in_the_performers_alone_and_in_training_alone():
    model, x = small('t2t'), images('t2t')
    model.init_weights()
    assert not torch.equal(model(x)[0], model(x)[0])
    model.exits[0].stem.eval()
    assert torch.equal(model(x, exits=1)[0], model(x, exits=1)[0])
    model.eval()
    assert torch.equal(model(x)[2], model(x)[2])
    assert {m.p for m in model.modules() if isinstance(m, nn.Dropout)} == {0.0, 0.1}


@pytest.mark.parametrize('family', FAMILIES)
def test_drop_path_grows_evenly_over_the_blocks_of_each_exit(family):
    model = small(family, drop_path_rate=0.1, arch=dict(ARCHS[family]['arch'], depth=3))
    for exit in model.exits:
        assert [getattr(block.drop_path, 'drop_prob', 0.0) for block in exit.blocks] == pytest.approx([0, 0.05, 0.1])


@pytest.mark.parametrize('family', FAMILIES)
@torch.no_grad()
def test_images_of_other_sizes_get_other_grids(family):
    model = drawn(family)
    side = ARCHS[family]['img_size']
    upstream, grids = None, []
    for i in range(3):
        logits, upstream = model.run_exit(i, torch.randn(2, 3, 2 * side, side), upstream)
        grids.append(upstream.grid)
        assert logits.isfinite().all()
    assert all(h > w for h, w in grids) and grids[0][1] < grids[2][1]


@torch.no_grad()
def test_other_sizes_are_as_in_a_model_made_for_them():
    """T2T-ViT learns no position embeddings, so its weights fit any image size."""
    model, larger = drawn('t2t'), small('t2t', grids=(4, 6, 8), img_size=128).eval()
    larger.load_state_dict(model.state_dict())
    x = torch.randn(2, 3, 128, 128)
    for got, want in zip(model(x), larger(x), strict=True):
        torch.testing.assert_close(got, want)


@torch.no_grad()
def test_on_other_grids_the_class_token_keeps_its_learned_position():
    model, moved, x = drawn('deit'), drawn('deit'), torch.randn(1, 3, 30, 56)
    moved.load_state_dict(model.state_dict())
    for exit, other in zip(model.exits, moved.exits, strict=True):
        exit.pos_embed[:, 1:] = 0.3  # the same everywhere, and therefore on any grid
        other.cls_token.copy_(exit.cls_token + exit.pos_embed[:, :1] - 0.3)
        other.pos_embed.fill_(0.3)
    for got, want in zip(model(x), moved(x), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('family', FAMILIES)
def test_forward_on_fake_cuda_tensors_without_waiting_for_results(family):
    side = ARCHS[family]['img_size']
    with FakeTensorMode(), torch.device('cuda'):  # a value of this type raises when it is read
        model, x = small(family), torch.randn(2, 3, side, side)
        for size in (x, torch.randn(2, 3, 2 * side, side)):
            assert all(logits.device.type == 'cuda' for logits in model(size))


@pytest.mark.parametrize('family', FAMILIES)
def test_bfloat16_autocast_is_finite_and_near(family):
    model, x = drawn(family), images(family)
    want = model(x)
    with torch.autocast('cpu', torch.bfloat16):
        got = model(x)
        sum(model(x, samples(2), mode='loss').values()).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    for a, b in zip(got, want, strict=True):
        assert (a - b).abs().max() < 0.05 * b.abs().max()


def test_frozen_parts_are_not_trained():
    model = small(train_cfg=dict(frozen=['norm', 'cls_token']))
    still = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert still == {f'exits.{k}.{part}' for k in range(3) for part in ('norm.weight', 'norm.bias', 'cls_token')}
    wrapper = build_optim_wrapper(model, dict(optimizer=dict(type='SGD', lr=1.0, weight_decay=0.5)))
    sum(model(images(), samples(2), mode='loss').values()).backward()
    before = model.exits[0].norm.weight.clone()
    wrapper.step()
    assert torch.equal(model.exits[0].norm.weight, before)


@pytest.mark.parametrize(
    ('options', 'words'),
    [
        (dict(arch='t2t-13'), "'t2t-13'.*'t2t-12'"),
        (dict(arch=dict(ARCHS['deit']['arch'], family='swin')), 'family'),
        (dict(grids=(7, 4)), r'grids=\(7, 4\)'),
        (dict(grids=(3, 7)), r'grids=\(3, 7\)'),
        (dict(grids=(14, 28, 29)), '28 px has no 29 patches'),
        (dict(arch='t2t-12', grids=(7, 9), img_size=224), r'\[7, 10, 14\] tokens along 224 px, but not 9'),
        (dict(dtn_layers=3), 'dtn_layers=3 .*2 blocks'),
        (dict(loss_weights=[1.0]), 'loss_weights.* 3 exits'),
        (dict(thresholds=[0.5]), '3 exits need 2'),
        (dict(train_cfg=dict(frozen=['stam'])), "no 'stam'"),
        (dict(arch=dict(ARCHS['deit']['arch'], num_heads=5)), '5 attention heads do not divide 48'),
    ],
)
def test_options_that_make_no_model(options, words):
    with pytest.raises(ValueError, match=words):
        small(**options)


def test_modes_that_are_none_are_refused():
    with pytest.raises(ValueError, match="mode='los'"):
        small()(images(), mode='los')


def test_the_small_numbers_that_keep_from_dividing_by_zero():
    """The epsilons are too small to change outputs unless the inputs are chosen for it."""
    for family, eps in (('t2t', 1e-5), ('deit', 1e-6)):
        assert {m.eps for m in small(family).modules() if isinstance(m, nn.LayerNorm)} == {eps}
    performer = small('t2t').exits[0].stem.attention1
    q, k, v = (scale * torch.randn(1, 20, 64, generator=torch.Generator().manual_seed(1)) for scale in (0.7, 0.7, 1.0))
    phi_q, phi_k = (
        (t.double() @ performer.features.double().T - t.double().pow(2).sum(-1, keepdim=True) / 2).exp() for t in (q, k)
    )
    weights = phi_q @ phi_k.mT / 32
    total = weights.sum(-1, keepdim=True)
    assert 1e-10 < total.median() < 1e-7
    torch.testing.assert_close(performer.attend(q, k, v), (weights @ v.double() / (total + 1e-8)).float())


@pytest.mark.slow
@pytest.mark.parametrize('family', FAMILIES)
@torch.no_grad()
def test_it_is_exported_by_torch(family):
    model, x = drawn(family), images(family)
    exported = torch.export.export(model, (x,)).module()
    torch.testing.assert_close(exported(x), model(x), rtol=0, atol=1e-5)
