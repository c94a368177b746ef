"""Confidence intervals of proportions, means and differences over prompts or seeds; the detectable gain; and pass@k."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import NormalDist
from typing import NamedTuple

_Z = NormalDist().inv_cdf(0.975)
LEAST_ROWS = 10
"""The minimum number of rows for a verdict on two evaluations."""
LARGE = 50
"""From this number of rows on, the normal distribution replaces Student's t for differences of zeros and ones."""


def wilson(successes: float, n: int, outside: float = 0.05) -> tuple[float, float]:
    """Return (low, high), the interval of a proportion (Wilson 1927) with the confidence 1 − `outside`.

    The interval stays inside [0, 1] and is not empty at 0 or n successes. Raises ValueError unless 0 ≤ successes ≤ n and n > 0.
    """
    if not 0 <= successes <= n or n < 1:
        raise ValueError(f"wilson got {successes} successes of {n}; expected 0 <= successes <= n and n > 0.")
    return _score(successes / n, n, NormalDist().inv_cdf(1 - outside / 2))


def _score(p: float, n: float, z: float) -> tuple[float, float]:
    centre = p + z**2 / (2 * n)
    spread = z * math.sqrt(p * (1 - p) / n + z**2 / (4 * n**2))
    scale = 1 + z**2 / n
    # Rounding would leave 3e-18 where the formula has 0.
    return 0.0 if p <= 0 else (centre - spread) / scale, 1.0 if p >= 1 else (centre + spread) / scale


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return (low, high), the 95 % interval of a mean.

    For values in [0, 1] it is Wilson's interval. If they vary less than zeros and ones with the same mean m, n is replaced by
    n·m·(1 − m)/s², with s their deviation. For other values it is `unbounded_interval`. Raises ValueError without values.
    """
    n, mean, error = _moments(values)
    if not all(0 <= value <= 1 for value in values):
        return unbounded_interval(values)
    if set(values) <= {0.0, 1.0} or not error:
        return _score(mean, n, _Z)
    return _score(mean, max(n, mean * (1 - mean) / error**2), _student(n - 1))


def unbounded_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return (low, high), the 95 % interval mean ± t·s/√n (Student's t). It is (NaN, NaN) if all values are equal.

    Raises ValueError without values.
    """
    n, mean, error = _moments(values)
    reach = _student(n - 1) * error if error else math.nan
    return mean - reach, mean + reach


def _moments(values: Sequence[float]) -> tuple[int, float, float]:
    """Return (the number of values, their mean, the mean's standard error s/√n)."""
    n = len(values)
    if not n:
        raise ValueError("An interval needs at least one value.")
    mean = math.fsum(values) / n
    if min(values) == max(values):  # rounding of the mean must not give equal values a spread
        return n, values[0], 0.0
    return n, mean, math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1) / n)


def _student(freedom: int) -> float:
    """Return Student's t at 97.5 %, accurate to 0.2 %, for `freedom` degrees of freedom (Abramowitz and Stegun, 26.7.5)."""
    if freedom < 3:
        return math.tan(0.475 * math.pi) if freedom == 1 else 0.95 * math.sqrt(2 / (1 - 0.95**2))
    z, v = _Z, freedom
    return (
        z
        + (z**3 + z) / (4 * v)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * v**3)
        + (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / (92160 * v**4)
    )


class Interval(NamedTuple):
    """A mean, or a difference of means, and its 95 % interval."""

    mean: float
    low: float
    high: float


def paired_difference(before: Sequence[float], after: Sequence[float]) -> Interval:
    """Return the mean of after − before over the same rows, and its 95 % interval.

    Formula: d̄ ± c·s(d)/√n. c is 1.96 if n ≥ `LARGE` and all differences are 0, x or −x, for one number x; else Student's t

    A change counts as real if the interval does not contain 0. For an unchanged policy and rows of 0 and 1 this happens in at
    most 5.6 % of cases, at any success rate and any n ≥ 10. The interval of such rows reaches at least ±3/n (the rule of three):
    even if no row changed, another row might change. Below `LARGE` rows it reaches at least ±4/n, so that four changed rows are
    not enough, as in McNemar's test. The ends are NaN if all values are the same number outside [0, 1].

    Raises ValueError without rows, and if the numbers of rows differ.
    """
    differences = [b - a for a, b in zip(before, after, strict=True)]
    n, mean, error = _moments(differences)
    values = [*before, *after]
    within = all(0 <= value <= 1 for value in values)
    span = 1.0 if within else max(values) - min(values)
    steps = {abs(d) for d in differences} - {0.0}
    alike = len(steps) < 2
    reach = (_Z if alike and n >= LARGE else _student(n - 1)) * error if error else 0.0
    if alike:
        reach = max(reach, (3 if n >= LARGE else 4) / n * max(steps, default=span))
    bound = 1.0 if within else math.inf
    return Interval(mean, max(-bound, mean - reach), min(bound, mean + reach)) if reach else Interval(mean, math.nan, math.nan)


def difference(before: Interval, after: Interval) -> Interval:
    """Return the difference of two independent means and its 95 % interval, computed from the intervals of the means.

    Formula: d − √((m₂ − l₂)² + (u₁ − m₁)²) to d + √((u₂ − m₂)² + (m₁ − l₁)²)

    Source: Newcombe 1998, Statistics in Medicine 17, 873, method 10.
    """
    change = after.mean - before.mean
    low = math.hypot(after.mean - after.low, before.high - before.mean)
    return Interval(change, change - low, change + math.hypot(after.high - after.mean, before.mean - before.low))


def detectable_gain(values: Sequence[float]) -> float:
    """Return the rise of the mean that a second evaluation of the same rows would detect with a probability of about 80 %.

    Formula: g = 2.8·√((v(m) + v(m + g))/n), with v the variance of a row at that mean

    g is at least 5.5/n times the values' range, at which four rows change in 80 % of cases. Below `LARGE` rows it is at least
    6.7/n times the range, for five rows. For values in [0, 1] the range is 1. Both evaluations are treated as independent. If
    rows differ in difficulty, the true detectable gain is smaller. Raises ValueError without values.
    """
    n, mean, error = _moments(values)
    within = all(0 <= value <= 1 for value in values)
    variance = error**2 * n
    share = variance / (mean * (1 - mean)) if within and variance else 1.0
    least = (5.5 if n >= LARGE else 6.7) / n * (1.0 if within else max(values) - min(values))
    gain = least
    for _ in range(30 if within else 1):
        moved = min(1.0, mean + gain)
        later = share * moved * (1 - moved) if within else variance
        gain = max(least, (_Z + NormalDist().inv_cdf(0.8)) * math.sqrt((variance + later) / n))
    return gain


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

    Raises ValueError unless 0 ≤ correct ≤ n and 1 ≤ k ≤ n.
    """
    if not (0 <= correct <= n and 1 <= k <= n):
        raise ValueError(f"pass_at_k got {correct} correct of {n} and k={k}; expected 0 <= correct <= n and 1 <= k <= n.")
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)
