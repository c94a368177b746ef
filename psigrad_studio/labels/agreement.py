"""Agreement between raters, and bias towards the side on which a completion is shown.

`ratings` is always [R, U]: the answers of R raters to U units, NaN where there is none. At the nominal level, numbers represent
categories. A figure that is undefined (no unit with two answers, or a single category) is NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

Level = Literal["nominal", "ordinal", "interval", "ratio"]
Floats = NDArray[np.float64]
AT_ONCE = 2**20
"""The maximum number of numbers in one table of the bootstrap."""


@dataclass(frozen=True)
class Proportion:
    """A proportion of `n` with its Wilson interval, and the p-value of the exact two-sided binomial test against `null`."""

    value: float
    low: float
    high: float
    n: int
    p_value: float
    null: float


def share(count: int, n: int, null: float = 0.5, confidence: float = 0.95) -> Proportion:
    """Return `count` of `n` as a proportion. All figures except `n` are NaN if n is 0."""
    if not n:
        return Proportion(np.nan, np.nan, np.nan, 0, np.nan, null)
    test = stats.binomtest(int(count), int(n), null)
    interval = test.proportion_ci(confidence, method="wilson")
    return Proportion(count / n, float(interval.low), float(interval.high), int(n), float(test.pvalue), null)


def counts(ratings: ArrayLike) -> tuple[NDArray[np.int64], Floats]:
    """Return the number of times each unit got each value, [U, K], and the K values in ascending order."""
    table = _table(ratings)
    values = np.unique(table[~np.isnan(table)])
    return np.stack([(table == v).sum(0) for v in values], 1) if values.size else np.zeros((table.shape[1], 0), int), values


def percent_agreement(ratings: ArrayLike) -> float:
    """Return the share of equal answers among all pairs of answers to one unit."""
    n, _ = counts(ratings)
    total = n.sum(1)
    pairs = (total * (total - 1)).sum()
    return float((n * (n - 1)).sum() / pairs) if pairs else np.nan


def cohen_kappa(a: ArrayLike, b: ArrayLike) -> float:
    """Return Cohen's kappa of two raters over the units that both rated: 1 − observed / expected disagreement (Cohen 1960)."""
    x, y = np.asarray(a, float), np.asarray(b, float)
    if x.shape != y.shape or x.ndim != 1:
        raise ValueError(f"The raters have shapes {x.shape} and {y.shape}; expected two lists of equal length.")
    both = ~(np.isnan(x) | np.isnan(y))
    x, y = x[both], y[both]
    if not x.size:
        return np.nan
    (u, p), (v, q) = (np.unique(z, return_counts=True) for z in (x, y))
    expected = float((np.outer(p, q) * (u[:, None] != v[None])).sum()) / x.size**2
    return float(1 - (x != y).mean() / expected) if expected else np.nan


def fleiss_kappa(ratings: ArrayLike) -> float:
    """Return Fleiss' kappa: (P − P_e) / (1 − P_e).

    P is the mean agreement of a unit and P_e = sum of squared category shares. It is defined if every unit has the same number of
    answers, two or more; otherwise `ValueError` is raised. Krippendorff's alpha accepts any number. See Fleiss 1971, "Measuring
    nominal scale agreement among many raters".
    """
    n, _ = counts(ratings)
    n = n[n.sum(1) > 0]
    if not n.size:
        return np.nan
    m = n.sum(1)
    if m.min() != m.max() or m[0] < 2:
        raise ValueError(
            f"The units have {m.min()} to {m.max()} answers; Fleiss' kappa needs the same number for each unit, 2 or more."
        )
    per_unit = (n * (n - 1)).sum(1) / (m * (m - 1))
    expected = np.square(n.sum(0) / n.sum()).sum()
    return float((per_unit.mean() - expected) / (1 - expected)) if expected < 1 else np.nan


@dataclass(frozen=True)
class Alpha:
    """Krippendorff's alpha with its percentile bootstrap interval over units. `units` counts those with two or more answers."""

    value: float
    low: float
    high: float
    units: int


def krippendorff_alpha(ratings: ArrayLike, level: Level = "nominal") -> float:
    """Return 1 − observed / expected disagreement, for any number of raters, with answers missing anywhere.

    Formula: alpha = 1 − (n − 1) · sum o_ck δ²_ck / sum n_c n_k δ²_ck, with o_ck the coincidences of values c and k within units,
             n_c their sums and n the sum of all

    The distance δ² is c ≠ k (nominal), (c − k)² (interval) or ((c − k) / (c + k))² (ratio). For ordinal values, it is the square
    of the number of answers from c to k, with half of those at both ends. See Krippendorff 2011, "Computing Krippendorff's
    alpha-reliability".
    """
    n, values = _shared(ratings)
    return float(_alphas(np.ones((1, len(n))), n, values, level)[0]) if len(n) else np.nan


def alpha_interval(ratings: ArrayLike, level: Level = "nominal", *, draws: int = 2000, seed: int = 0) -> Alpha:
    """Return `krippendorff_alpha` with a percentile bootstrap interval: `draws` resamples of the units."""
    n, values = _shared(ratings)
    units = len(n)
    if not units:
        return Alpha(np.nan, np.nan, np.nan, 0)
    random, chances = np.random.default_rng(seed), np.full(units, 1 / units)
    block = max(1, AT_ONCE // max(n.shape))
    sizes = [min(block, draws - start) for start in range(0, draws, block)]
    found = [_alphas(random.multinomial(units, chances, size=size).astype(float), n, values, level) for size in sizes]
    alphas = np.concatenate(found)
    alphas = alphas[~np.isnan(alphas)]
    low, high = np.quantile(alphas, [0.025, 0.975]) if alphas.size else (np.nan, np.nan)
    whole = float(_alphas(np.ones((1, units)), n, values, level)[0])
    return Alpha(whole, float(low), float(high), units)


def _shared(ratings: ArrayLike) -> tuple[Floats, Floats]:
    """Return `counts` of the units that have two answers or more."""
    n, values = counts(ratings)
    return n[n.sum(1) > 1].astype(float), values


def _alphas(weights: Floats, n: Floats, values: Floats, level: Level) -> Floats:
    """Return [D] alpha of D resamples of the units, with counts [U, K]. `weights` [D, U] say how often each unit was drawn.

    The result is NaN if all values are equal. A unit of m answers adds the sum of δ² over its pairs, divided by m − 1, to the
    observed disagreement. If δ is a difference of positions p, the sum over all pairs of N answers is 2 (N sum p² − (sum p)²), so
    that no table of all pairs is needed.
    """
    n_c, m = weights @ n, n.sum(1)
    total = n_c.sum(-1)
    if level == "nominal":
        within, expected = m**2 - (n**2).sum(-1), total**2 - (n_c**2).sum(-1)
    elif level == "ratio":
        sums = values[:, None] + values
        distance = ((values[:, None] - values) / np.where(sums == 0, 1, sums)) ** 2
        within, expected = ((n @ distance) * n).sum(-1), ((n_c @ distance) * n_c).sum(-1)
    else:
        place = values[None] - values.mean() if level == "interval" else np.cumsum(n_c, -1) - n_c / 2
        mean = (n_c * place).sum(-1, keepdims=True) / total[:, None]
        within, expected = 2 * (m * (place**2 @ n.T) - (place @ n.T) ** 2), 2 * total * (n_c * (place - mean) ** 2).sum(-1)
    observed = (total - 1) * (weights * within / (m - 1)).sum(-1)
    several = (n_c > 0).sum(-1) > 1
    return np.where(several, 1 - observed / np.where(several, expected, 1), np.nan)


def _table(ratings: ArrayLike) -> Floats:
    table = np.asarray(ratings, float)
    if table.ndim != 2:
        raise ValueError(f"The ratings have {table.ndim} axes; expected 2: raters and units.")
    return table
