"""Compares the statistics of few seeds with published tables and with simulation."""

import math

import numpy as np
import pytest
from scipy import stats

from mmdtn.studies import compare, seeds_needed, std_interval


# Tables of the paired t test, two-sided at 5%, power 80% (Cohen; G*Power 3.1).
@pytest.mark.parametrize('effect, seeds', [(0.5, 34), (0.8, 15), (1.0, 10), (1.5, 6)])
def test_seeds_needed_are_those_of_the_tables(effect, seeds):
    assert seeds_needed(std=1 / effect, difference=1) == seeds
    assert seeds_needed(std=2, difference=-2 * effect) == seeds


def test_seeds_needed_reach_the_power_and_one_less_does_not():
    rng = np.random.default_rng(0)
    n = seeds_needed(std=1.3, difference=1)
    power = [
        (stats.ttest_1samp(rng.normal(1, 1.3, (20000, count)), 0, axis=1).pvalue < 0.05).mean() for count in (n - 1, n)
    ]
    assert power[0] < 0.8 + 0.01 and power[1] > 0.8 - 0.01


def test_more_spread_takes_no_fewer_seeds():
    needed = [seeds_needed(std=std / 200, difference=1) for std in range(1, 400, 3)]
    assert needed == sorted(needed) and needed[0] == 2


def test_limits_of_seeds_needed():
    assert seeds_needed(std=0, difference=1) == 2
    assert seeds_needed(std=100, difference=1, limit=50) is None


def test_intervals_of_paired_differences():
    """95% of Student's distribution with 3 degrees of freedom is between -3.1824 and 3.1824."""
    differences = np.array([1.0, 0.6, -0.7, 2.3])
    found = compare(differences + 60, [60.0] * 4)
    reach = 3.1824 * differences.std(ddof=1) / 2
    assert found.student == pytest.approx((0.8 - reach, 0.8 + reach), abs=1e-3)
    assert (found.seeds, found.mean, found.std) == (4, pytest.approx(0.8), pytest.approx(differences.std(ddof=1)))
    assert compare([1.0, 5.0, 2.0], [0, 0, 0]).bootstrap == pytest.approx((1, 5)), 'of three seeds their range'


def test_one_seed_has_no_interval():
    found = compare([2.0], [1.5])
    assert found.mean == 0.5 and math.isnan(found.std) and math.isnan(found.student[0])


def test_equal_seeds_pair():
    """The effect of a seed cancels in the difference of a pair, so pairs are more precise than means."""
    common = np.array([10.0, 20.0, 30.0])
    found = compare(common + [1.0, 1.1, 0.9], common)
    assert found.std == pytest.approx(0.1) and found.student[0] > 0.7


def test_the_interval_of_a_spread_holds_it_in_95_of_100_studies():
    spreads = np.random.default_rng(2).normal(0, 3, (20000, 4)).std(axis=1, ddof=1)
    ends = np.array([std_interval(std, 4) for std in spreads[:4000]])
    assert ((ends[:, 0] < 3) & (ends[:, 1] > 3)).mean() == pytest.approx(0.95, abs=0.01)
