"""Confidence intervals of a proportion, of a mean over prompts, and of a mean over seeds; and pass@k."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import NormalDist
from typing import NamedTuple

_Z = NormalDist().inv_cdf(0.975)
LEAST_ROWS = 10
"""The number of values below which no interval here is reliable. A 95 % interval covers the mean in 92 % of samples of ten normal
values, and in 85 % of samples of four.
"""


def wilson(successes: float, n: int, outside: float = 0.05) -> tuple[float, float]:
    """Return the interval of a proportion (Wilson 1927): 95 %, or 1 − `outside`.

    It stays inside [0, 1] and is not empty at 0 or n successes.
    """
    p, z = successes / n, NormalDist().inv_cdf(1 - outside / 2)
    centre = p + z**2 / (2 * n)
    spread = z * math.sqrt(p * (1 - p) / n + z**2 / (4 * n**2))
    scale = 1 + z**2 / n
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of a mean: Wilson's for zeros and ones, else mean ± 1.96 s/√n (the mean itself for n = 1)."""
    n, mean = len(values), math.fsum(values) / len(values)
    if set(values) <= {0.0, 1.0}:
        return wilson(math.fsum(values), n)
    if n == 1:
        return mean, mean
    error = _Z * math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1) / n)
    return mean - error, mean + error


class Interval(NamedTuple):
    """A mean over seeds and its 95 % interval."""

    mean: float
    low: float
    high: float


def over_seeds(values: Iterable[float]) -> Interval:
    """Return the mean and 95 % interval (Student's t) of independent values. The interval of a single value is that value."""
    from scipy import stats  # takes half a second, so training does not import it

    found = [float(value) for value in values]
    n, mean = len(found), math.fsum(found) / len(found)
    if n == 1:
        return Interval(mean, mean, mean)
    reach = float(stats.t.ppf(0.975, n - 1)) * math.sqrt(math.fsum((v - mean) ** 2 for v in found) / (n - 1) / n)
    return Interval(mean, mean - reach, mean + reach)


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Return the probability that k of n completions, drawn without replacement, include a correct one.

    Formula: 1 - C(n - c, k) / C(n, k). It is unbiased, unlike 1 - (1 - c/n)^k.
    Source: Chen et al. 2021, "Evaluating Large Language Models Trained on Code".
    """
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)
