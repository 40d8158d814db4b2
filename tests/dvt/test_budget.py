"""Compares thresholds with a loop over images, with those of the authors' code, and with an exhaustive search."""

import itertools
import json

import numpy as np
import pytest
import torch

from mmdtn.dvt import budget

from .test_golden import GOLDEN, golden

GFLOPS = torch.tensor([0.47, 1.43, 3.31])


def drawn(images: int, exits: int = 3, decimals: int | None = None, seed: int = 0):
    """Returns random confidences, and hits that are more likely for higher confidences."""
    rng = torch.Generator().manual_seed(seed)
    ease = torch.rand(images, generator=rng)
    conf = (ease + 0.15 * torch.arange(exits)[:, None] + 0.2 * torch.randn(exits, images, generator=rng)).sigmoid()
    hit = torch.rand(exits, images, generator=rng) < conf
    return (conf if decimals is None else conf.mul(10**decimals).round() / 10**decimals), hit


def loop(conf, share):
    """Applies one row of thresholds image by image."""
    exits, images = conf.shape
    left, out = set(range(images)), []
    for k in range(exits - 1):
        wanted = int(np.floor(np.float32(images) * np.float32(share[k])))
        surest = sorted((float(conf[k, n]) for n in left), reverse=True)
        out.append(surest[wanted - 1] if 0 < wanted <= len(surest) else 1e8)
        left -= {n for n in left if float(conf[k, n]) >= out[-1]}
    return [*out, -1e8]


def choose(conf, hit, row, gflops):
    right, cost, left = 0, 0.0, [0] * len(conf)
    for n in range(conf.shape[1]):
        k = next(k for k in range(len(conf)) if float(conf[k, n]) >= row[k])
        right, cost = right + bool(hit[k, n]), cost + float(gflops[k])
        left[k] += 1
    return 100 * right / conf.shape[1], cost / conf.shape[1], left


@pytest.mark.parametrize('exits', [2, 3, 4])
@pytest.mark.parametrize(('images', 'decimals'), [(300, None), (300, 2), (200, 1), (17, None), (17, 1), (3, None)])
def test_thresholds_are_those_of_a_loop_over_images(images, decimals, exits):
    conf, hit = drawn(images, exits, decimals)
    shares = budget.shares(exits)
    found = budget.find_thresholds(conf, shares)
    assert found.tolist() == [loop(conf, share) for share in shares]
    cost = torch.arange(1.0, exits + 1)
    got = budget.outcome(conf, hit, found, cost)
    for i in range(0, 59, 7):
        accuracy, gflops, left = choose(conf, hit, found[i].tolist(), cost)
        assert got.accuracy[i].item() == pytest.approx(accuracy, abs=1e-9)
        assert got.gflops[i].item() == pytest.approx(gflops, abs=1e-6)
        assert got.left[i].tolist() == left


def tables(case):
    """Returns confidences, stored in hundredths, and hits, stored as bits, of the authors' calibration and validation
    sets.
    """
    out = []
    for part, source in (('cal', case), ('val', 'ties')):
        conf = GOLDEN[f'budget/{source}/{part}_conf']
        hit = np.unpackbits(GOLDEN[f'budget/{source}/{part}_hit'], axis=1, count=conf.shape[1])
        out.append((torch.from_numpy(conf) / 100, torch.from_numpy(hit)))
    return out


@pytest.mark.parametrize('case', ['ties', 'tiny'])
def test_thresholds_and_curves_are_those_of_the_authors_code(case):
    (conf, _), (val_conf, val_hit) = tables(case)
    shares = budget.shares(3)
    torch.testing.assert_close(shares, golden('budget', case, 'shares'), rtol=1e-6, atol=0)
    assert torch.equal((conf.shape[1] * shares).floor()[:, :2].long(), golden('budget', case, 'n_leave'))
    found = budget.find_thresholds(conf, shares)
    assert torch.equal(found, golden('budget', case, 'thresholds'))
    taken = budget.exits_taken(conf, found)
    assert torch.equal(torch.stack([(taken == k).sum(1) for k in range(3)], 1), golden('budget', case, 'cal_left'))
    got = budget.outcome(val_conf, val_hit, found, GFLOPS)
    assert torch.equal(got.left, golden('budget', case, 'val_left'))
    torch.testing.assert_close(got.accuracy, golden('budget', case, 'val_accuracy'), rtol=0, atol=1e-9)
    torch.testing.assert_close(got.gflops, golden('budget', case, 'val_gflops'), rtol=0, atol=1e-5)


@pytest.mark.parametrize(('exits', 'first', 'last'), [(3, (0.950, 0.0475, 0.0024), (0.079, 0.233, 0.688))])
def test_the_ends_of_the_curve(exits, first, last):
    """The curve of T2T-ViT-12 goes from 0.527 to 2.784 GFLOPs on the calibration set."""
    shares = budget.shares(exits)
    for got, want in ((shares[0], first), (shares[-1], last)):
        torch.testing.assert_close(got, torch.tensor(want), rtol=0, atol=5e-4)
    conf, hit = drawn(20_000)
    got = budget.outcome(conf, hit, budget.find_thresholds(conf, shares), torch.tensor([0.4725, 1.4625, 3.4975]))
    assert (got.left / 20_000 - shares)[:, :2].abs().max() <= 1 / 20_000 + 1e-6, 'no two are equal'
    assert got.gflops[[0, -1]].tolist() == pytest.approx([0.527, 2.784], abs=1e-3)
    assert (got.gflops.diff() >= 0).all()


def test_images_leave_together_or_not_at_all():
    conf = torch.tensor([[0.5, 0.5, 0.5, 0.1], [0.9, 0.2, 0.2, 0.2]])
    found = budget.find_thresholds(conf, torch.tensor([[0.25, 0.75], [0.2, 0.8]]))
    assert found.tolist() == [[0.5, -1e8], [1e8, -1e8]]
    taken = budget.exits_taken(conf, torch.tensor([[0.5, 7.0], [1e8, 1e8], [-1e8, -1e8]]))
    assert taken.tolist() == [[0, 0, 0, 1], [1, 1, 1, 1], [0, 0, 0, 0]], 'the last exit takes what is left'


@pytest.mark.parametrize('exits', [2, 3])
def test_search_finds_the_best_of_all_thresholds(exits):
    """Every combination of the confidences themselves is tried, as only these thresholds can make a difference."""
    conf, hit = drawn(14, exits, seed=2)
    cost = torch.tensor([1.0, 2.0, 5.0])[:exits]
    rows = itertools.product(*([*row.tolist(), 1e8] for row in conf[:-1]))
    every = torch.tensor([[*row, -1e8] for row in rows])
    results = budget.outcome(conf, hit, every, cost)
    budgets = torch.linspace(1.0, float(cost[-1]), 9)
    got = budget.outcome(conf, hit, budget.search(conf, hit, cost, budgets), cost)
    for i, limit in enumerate(budgets.tolist()):
        affordable = results.gflops <= limit + 1e-6
        assert got.gflops[i] <= limit + 1e-6
        assert got.accuracy[i].item() == pytest.approx(results.accuracy[affordable].max().item())


@pytest.mark.parametrize('candidates', [5, 100])
def test_search_is_never_below_the_sweep_on_its_own_images(candidates):
    conf, hit = drawn(3000)
    sweep = budget.find_thresholds(conf, budget.shares(3))
    swept = budget.outcome(conf, hit, sweep, GFLOPS)
    got = budget.outcome(conf, hit, budget.search(conf, hit, GFLOPS, swept.gflops, sweep, candidates), GFLOPS)
    assert (got.accuracy >= swept.accuracy).all() and (got.gflops <= swept.gflops + 1e-5).all()
    assert (got.accuracy > swept.accuracy).any()


def test_a_budget_below_the_first_exit_is_refused():
    conf, hit = drawn(10)
    with pytest.raises(ValueError, match=r'0\.4 GFLOPs .*0\.47 GFLOPs'):
        budget.search(conf, hit, GFLOPS, torch.tensor([0.4, 1.0]))


def test_thresholds_of_a_budget_are_read_from_a_curve(tmp_path):
    file = tmp_path / 'budget.json'
    file.write_text(json.dumps(dict(sweep=[dict(gflops=g, thresholds=[g, 0.5, -1e8]) for g in (0.5, 0.9, 1.2)])))
    assert budget.read_thresholds(file, 1.0) == [0.9, 0.5, -1e8]
    with pytest.raises(ValueError, match=r'cheapest thresholds in .+ 0\.5 '):
        budget.read_thresholds(file, 0.4)
    with pytest.raises(ValueError, match="no curve 'exact'"):
        budget.read_thresholds(file, 0.4, search='exact')
