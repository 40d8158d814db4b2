"""Statistics of paired comparisons with few seeds."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

RESAMPLES = 10_000


class Comparison(NamedTuple):
    """Statistics of the differences between a variant and the baseline, paired by seed, with 95% intervals."""

    seeds: int
    mean: float
    std: float  # standard deviation of one difference; NaN for a single seed, like the intervals
    bootstrap: tuple[float, float]
    student: tuple[float, float]


def compare(values: Sequence[float], baseline: Sequence[float]) -> Comparison:
    """Compares values with those of the baseline.

    ``values[i]`` and ``baseline[i]`` must come from the same seed. Base conclusions on Student's interval, which
    contains the true mean in 95 of 100 studies if differences are normally distributed. The percentile bootstrap
    interval never extends beyond the observed differences. With three seeds, the bootstrap interval reaches from the
    smallest to the largest difference and contains the true mean in only about 75 of 100 studies.
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
    """Computes the 95% confidence interval of a normal distribution's standard deviation.

    ``std`` is the estimate from ``n`` values.
    """
    low, high = (float(stats.chi2.ppf(p, n - 1)) for p in (0.975, 0.025))
    return std * math.sqrt((n - 1) / low), std * math.sqrt((n - 1) / high)


def seeds_needed(std: float, difference: float, power: float = 0.8, limit: int = 10_000) -> int | None:
    """Computes how many seeds a paired t test at the 5% level needs to detect ``difference`` with the given power.

    Returns None if the number exceeds ``limit``.

    Example:
        >>> seeds_needed(std=1.0, difference=1.0)
        10
    """
    if std == 0:
        return 2
    for n in range(2, limit + 1):
        shift = abs(difference) / std * math.sqrt(n)
        critical = stats.t.ppf(0.975, n - 1)
        wrong_sign = np.nan_to_num(stats.nct.cdf(-critical, n - 1, shift))  # SciPy returns NaN for values near 0
        if stats.nct.sf(critical, n - 1, shift) + wrong_sign >= power:
            return n
    return None
