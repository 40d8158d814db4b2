"""Resampling and reuse: what each exit hands to the next, and its effect."""

import pytest
import torch
import torch.nn.functional as F

from mmdtn.dvt import DVT
from mmdtn.dvt.reuse import resample, resample_relations

from ..backbones.helpers import randomised
from .oracle import averages

ARCH = dict(base='deit-s', width=48, depth=2, num_heads=3)
SMALL = dict(arch=ARCH, num_classes=7, grids=(3, 4, 7), img_size=28, drop_path_rate=0.0)
SIZES = [(7, 10), (10, 14), (7, 14), (12, 16), (5, 5)]


def matrix(s: int, t: int) -> torch.Tensor:
    """Returns the matrix of ``resample``, ``t t x s s``, from its outputs for one-hot maps."""
    return resample(torch.eye(s * s), (s, s), (t, t)).T


@pytest.mark.parametrize(('s', 't'), SIZES)
def test_resampling_is_that_of_the_paper(s, t):
    U = averages(s, t)
    torch.testing.assert_close(U.sum(1), torch.ones(t))
    torch.testing.assert_close(matrix(s, t), torch.kron(U, U), rtol=0, atol=1e-6)
    if (s, t) == (7, 10):
        want = torch.tensor([[1, 0, 0, 0, 0, 0, 0], [3, 3, 0, 0, 0, 0, 0], [0, 4, 2, 0, 0, 0, 0]]) / 6
        want[0] = torch.tensor([1, 0, 0, 0, 0, 0, 0])
        torch.testing.assert_close(U[:3], want)


@pytest.mark.parametrize(('s', 't'), SIZES)
def test_resampling_interpolates_and_pools(s, t):
    x = torch.randn(2, 5, s, s)
    want = F.adaptive_avg_pool2d(F.interpolate(x, size=(2 * s, 2 * s)), t)
    torch.testing.assert_close(resample(x.flatten(2), (s, s), (t, t)), want.flatten(2), rtol=0, atol=4e-7)


@pytest.mark.parametrize('change', [lambda x: x.flip(-1), lambda x: x.flip(-2), lambda x: x.mT], ids='xyt')
@pytest.mark.parametrize(('s', 't'), SIZES)
def test_resampling_commutes_with_flips_and_transposition(s, t, change):
    x = torch.randn(2, s, s)
    one = resample(change(x).flatten(1), (s, s), (t, t)).view(2, t, t)
    other = change(resample(x.flatten(1), (s, s), (t, t)).view(2, t, t))
    torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


def test_grids_need_not_be_square():
    x = torch.randn(2, 3 * 5)
    U, V = averages(3, 4), averages(5, 9)
    want = torch.einsum('ti,bij,uj->btu', U, x.view(2, 3, 5), V).flatten(1)
    torch.testing.assert_close(resample(x, (3, 5), (4, 9)), want)


def test_relations_keep_row_and_column_of_the_class_token():
    x = torch.randn(2, 3, 50, 50)
    y = resample_relations(x, (7, 7), (10, 10))
    assert torch.equal(y[..., 0, 0], x[..., 0, 0])
    M = matrix(7, 10)
    torch.testing.assert_close(y[..., 0, 1:], x[..., 0, 1:] @ M.T)
    torch.testing.assert_close(y[..., 1:, 0], x[..., 1:, 0] @ M.T)
    torch.testing.assert_close(y[..., 1:, 1:], M @ x[..., 1:, 1:] @ M.T)


def pair(**options):
    """Returns two cascades that have the same weights where both have them."""
    one = randomised(DVT(**SMALL))
    other = DVT(**SMALL | options).eval()
    other.load_state_dict({k: v for k, v in one.state_dict().items() if k in other.state_dict()}, strict=True)
    return one, other


@torch.no_grad()
def test_without_its_last_convolution_an_exit_is_one_without_relationship_reuse():
    one, other = pair(reuse_relations=False)
    x = torch.randn(2, 3, 28, 28)
    assert (one(x)[2] - other(x)[2]).abs().max() > 1e-3
    for exit in one.exits[1:]:
        exit.relations.conv2.weight.zero_()
        exit.relations.conv2.bias.zero_()
    torch.testing.assert_close(one(x), other(x), rtol=0, atol=1e-5)


@torch.no_grad()
def test_features_of_zero_still_move_the_statistics_of_the_second_norm():
    """Zero features change the result, in the same way as a second norm that is written out with 48 zeros."""
    model = randomised(DVT(**SMALL | dict(reuse_relations=False, grids=(3, 4))))
    plain = randomised(DVT(**SMALL | dict(reuse_relations=False, reuse_features=False, grids=(3, 4))), seed=1)
    state = {k: v for k, v in model.state_dict().items() if '.features.' not in k}
    for key in [k for k in state if k.startswith('exits.1.') and ('norm2' in k or 'fc1.weight' in k)]:
        state[key] = state[key][..., :48]
    plain.load_state_dict(state)
    for block in model.exits[1].blocks:
        block.features.mlp.fc2.weight.zero_()
        block.features.mlp.fc2.bias.zero_()
        block.mlp.fc1.weight[:, 48:].zero_()
    x = torch.randn(2, 3, 28, 28)
    assert (model(x)[1] - plain(x)[1]).abs().max() > 1e-3
    for block in plain.exits[1].blocks:
        block.norm2.forward = lambda y, n=block.norm2: _normalised_with_zeros(y, n)
    torch.testing.assert_close(model(x), plain(x), rtol=0, atol=1e-5)


def _normalised_with_zeros(y, norm):
    mean = y.sum(-1, keepdim=True) / 96
    var = ((y - mean).pow(2).sum(-1, keepdim=True) + 48 * mean.pow(2)) / 96
    return (y - mean) / (var + norm.eps).sqrt() * norm.weight + norm.bias


@torch.no_grad()
def test_exits_do_not_depend_on_later_ones():
    model = randomised(DVT(**SMALL))
    x = torch.randn(2, 3, 28, 28)
    before = model(x)
    assert [len(model(x, exits=k)) for k in (1, 2, 3)] == [1, 2, 3]
    torch.testing.assert_close(model(x, exits=2)[1], before[1])
    for p in model.exits[1].parameters():
        p.add_(0.1)
    after = model(x)
    assert torch.equal(before[0], after[0])
    assert all((b - a).abs().max() > 1e-3 for b, a in zip(before[1:], after[1:], strict=True))


@pytest.mark.parametrize(('features', 'relations'), [(True, False), (False, True), (True, True)])
def test_the_last_exits_loss_reaches_the_first_exits_blocks_but_not_its_answer(features, relations):
    model = randomised(DVT(**SMALL | dict(reuse_features=features, reuse_relations=relations)))
    model(torch.randn(2, 3, 28, 28))[2].square().sum().backward()
    reached = {name for name, p in model.exits[0].named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}
    never = {'norm.weight', 'norm.bias', 'head.weight', 'head.bias'}
    everything = {name for name, _ in model.exits[0].named_parameters()}
    if not features:  # only the logits of the last block are reused
        last = {name for name in everything if name.startswith('blocks.1.') and '.norm1.' not in name}
        never |= last - {'blocks.1.attn.qkv.weight', 'blocks.1.attn.qkv.bias'}
    assert everything - reached == never


@torch.no_grad()
def test_the_class_token_handed_on_changes_nothing():
    model = randomised(DVT(**SMALL | dict(reuse_relations=False)))
    x = torch.randn(2, 3, 28, 28)
    _, upstream = model.run_exit(0, x, None)
    tokens = upstream.tokens.clone()
    tokens[:, 0] += 10
    want, _ = model.run_exit(1, x, upstream)
    assert torch.equal(model.run_exit(1, x, upstream._replace(tokens=tokens))[0], want)
    tokens[:, 1] += 10
    assert not torch.equal(model.run_exit(1, x, upstream._replace(tokens=tokens))[0], want)
