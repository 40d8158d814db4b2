"""How much a few seeds can tell."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

RESAMPLES = 10_000


class Comparison(NamedTuple):
    """Paired differences of one thing to the baseline, run by run with the same seed; intervals of 95%."""

    seeds: int
    mean: float
    std: float  # of one difference; NaN for a single seed, as the intervals are
    bootstrap: tuple[float, float]
    student: tuple[float, float]


def compare(values: Sequence[float], baseline: Sequence[float]) -> Comparison:
    """``values[i]`` and ``baseline[i]`` are of the same seed.

    The percentile bootstrap knows no value beyond those that occurred. Of three seeds its interval is from the smallest
    difference to the largest, which hold the true mean in about 75 of 100 studies. Student's interval holds it in 95,
    if differences are normally distributed, and is the one to conclude from.
    """
    differences = np.asarray(values, float) - np.asarray(baseline, float)
    n = len(differences)
    mean = float(differences.mean())
    if n < 2:
        return Comparison(n, mean, math.nan, (math.nan, math.nan), (math.nan, math.nan))
    rng = np.random.default_rng(0)
    drawn = stats.bootstrap((differences,), np.mean, n_resamples=RESAMPLES, method='percentile', rng=rng)
    student = stats.ttest_rel(values, baseline).confidence_interval()
    return Comparison(n, mean, float(differences.std(ddof=1)), tuple(drawn.confidence_interval), tuple(student))


def std_interval(std: float, n: int) -> tuple[float, float]:
    """Where the standard deviation of a normal distribution is, with 95%, that n values have given as ``std``."""
    low, high = (float(stats.chi2.ppf(p, n - 1)) for p in (0.975, 0.025))
    return std * math.sqrt((n - 1) / low), std * math.sqrt((n - 1) / high)


def seeds_needed(std: float, difference: float, power: float = 0.8, limit: int = 10_000) -> int | None:
    """Seeds of each, so that a paired t test at 5% sees ``difference`` with this probability; None: over the limit.

    Example:
        >>> seeds_needed(std=1.0, difference=1.0)
        10
    """
    if std == 0:
        return 2
    for n in range(2, limit + 1):
        shift = abs(difference) / std * math.sqrt(n)
        critical = stats.t.ppf(0.975, n - 1)
        wrong_sign = np.nan_to_num(stats.nct.cdf(-critical, n - 1, shift))  # SciPy has NaN where it is nearly 0
        if stats.nct.sf(critical, n - 1, shift) + wrong_sign >= power:
            return n
    return None
