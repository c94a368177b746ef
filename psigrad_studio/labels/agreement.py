"""Agreement between raters, and whether the side on which a completion is shown decides.

`ratings` is always [R, U]: the answers of R raters to U units, NaN where there is none. At the nominal level numbers stand for
categories. A figure that is undefined (no unit with two answers, or a single category) is NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

Level = Literal["nominal", "ordinal", "interval", "ratio"]
Floats = NDArray[np.float64]


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
    """`count` of `n` as a proportion. All figures but `n` are NaN where n is 0."""
    if not n:
        return Proportion(np.nan, np.nan, np.nan, 0, np.nan, null)
    test = stats.binomtest(int(count), int(n), null)
    interval = test.proportion_ci(confidence, method="wilson")
    return Proportion(count / n, float(interval.low), float(interval.high), int(n), float(test.pvalue), null)


def counts(ratings: ArrayLike) -> tuple[NDArray[np.int64], Floats]:
    """How often each unit got each value, [U, K], and the K values in ascending order."""
    table = _table(ratings)
    values = np.unique(table[~np.isnan(table)])
    return np.stack([(table == v).sum(0) for v in values], 1) if values.size else np.zeros((table.shape[1], 0), int), values


def percent_agreement(ratings: ArrayLike) -> float:
    """The share of equal answers among all pairs of answers to one unit."""
    n, _ = counts(ratings)
    total = n.sum(1)
    pairs = (total * (total - 1)).sum()
    return float((n * (n - 1)).sum() / pairs) if pairs else np.nan


def cohen_kappa(a: ArrayLike, b: ArrayLike, weights: Literal["none", "linear", "quadratic"] = "none") -> float:
    """Cohen's kappa of two raters over the units that both rated: 1 − observed / expected disagreement.

    A disagreement of values x and y weighs 1, |x − y| or (x − y)². See Cohen 1960 and 1968, "Weighted kappa".
    """
    x, y = np.asarray(a, float), np.asarray(b, float)
    if x.shape != y.shape or x.ndim != 1:
        raise ValueError(f"The raters have shapes {x.shape} and {y.shape}; expected two lists of equal length.")
    both = ~(np.isnan(x) | np.isnan(y))
    x, y = x[both], y[both]
    if not x.size:
        return np.nan
    weigh: dict[str, Callable[[Floats], Floats]]
    weigh = {"none": lambda d: (d != 0).astype(float), "linear": np.abs, "quadratic": np.square}
    (u, p), (v, q) = (np.unique(z, return_counts=True) for z in (x, y))
    expected = float((np.outer(p, q) * weigh[weights](u[:, None] - v[None])).sum()) / x.size**2
    return float(1 - weigh[weights](x - y).mean() / expected) if expected else np.nan


def fleiss_kappa(ratings: ArrayLike) -> float:
    """Fleiss' kappa: (P − P_e) / (1 − P_e), where P is the mean agreement of a unit and P_e = sum of squared category shares.

    Defined where every unit has the same number of answers, two or more; raises `ValueError` else (Krippendorff's alpha takes
    any number). See Fleiss 1971, "Measuring nominal scale agreement among many raters".
    """
    n, _ = counts(ratings)
    n = n[n.sum(1) > 0]
    if not n.size:
        return np.nan
    m = n.sum(1)
    if m.min() != m.max() or m[0] < 2:
        raise ValueError(
            f"The units have {m.min()} to {m.max()} answers; Fleiss' kappa takes the same number, 2 or more, of each."
        )
    per_unit = (n * (n - 1)).sum(1) / (m * (m - 1))
    expected = np.square(n.sum(0) / n.sum()).sum()
    return float((per_unit.mean() - expected) / (1 - expected)) if expected < 1 else np.nan


@dataclass(frozen=True)
class Alpha:
    """Krippendorff's alpha with its percentile bootstrap interval over units; `units` had two answers or more."""

    value: float
    low: float
    high: float
    units: int


def krippendorff_alpha(ratings: ArrayLike, level: Level = "nominal") -> float:
    """1 − observed / expected disagreement, for any number of raters, with answers missing anywhere.

    With o_ck the coincidences of values c and k within units, n_c their sums and n the sum of all,
    alpha = 1 − (n − 1) · sum o_ck δ²_ck / sum n_c n_k δ²_ck. The distance δ² is c ≠ k (nominal), (c − k)² (interval),
    ((c − k) / (c + k))² (ratio), or, ordinal, the square of the number of answers from c to k, those at the ends counted half.
    See Krippendorff 2011, "Computing Krippendorff's alpha-reliability".
    """
    each, values = _coincidences(ratings)
    return float(_alpha(each.sum(0), values, level)) if values.size else np.nan


def alpha_interval(
    ratings: ArrayLike, level: Level = "nominal", *, confidence: float = 0.95, draws: int = 2000, seed: int = 0
) -> Alpha:
    """`krippendorff_alpha` with a percentile bootstrap interval: `draws` resamples of the units."""
    each, values = _coincidences(ratings)
    units = len(each)
    if not units:
        return Alpha(np.nan, np.nan, np.nan, 0)
    random = np.random.default_rng(seed)
    weights = random.multinomial(units, np.full(units, 1 / units), size=draws).astype(float)
    again = (weights @ each.reshape(units, -1)).reshape(draws, len(values), len(values))
    alphas = _alpha(again, values, level)
    alphas = alphas[~np.isnan(alphas)]
    low, high = np.quantile(alphas, [(1 - confidence) / 2, (1 + confidence) / 2]) if alphas.size else (np.nan, np.nan)
    return Alpha(float(_alpha(each.sum(0), values, level)), float(low), float(high), units)


def _coincidences(ratings: ArrayLike) -> tuple[Floats, Floats]:
    """[U, K, K] coincidences of the units that have two answers or more, and the K values."""
    n, values = counts(ratings)
    n = n[n.sum(1) > 1].astype(float)
    within = n[:, :, None] * n[:, None, :] - n[:, :, None] * np.eye(len(values))
    return within / np.maximum(n.sum(1) - 1, 1)[:, None, None], values


def _alpha(o: Floats, values: Floats, level: Level) -> Floats:
    """Alpha of each coincidence matrix of [..., K, K]."""
    n_c = o.sum(-1)
    distance = _distance(values, n_c, level)
    expected = (n_c[..., :, None] * n_c[..., None, :] * distance).sum((-2, -1))
    observed = (n_c.sum(-1) - 1) * (o * distance).sum((-2, -1))
    return np.where(expected > 0, 1 - observed / np.where(expected > 0, expected, 1), np.nan)


def _distance(values: Floats, n_c: Floats, level: Level) -> Floats:
    c, k = values[:, None], values[None]
    if level == "nominal":
        return np.asarray(c != k, float)
    if level == "interval":
        return np.asarray((c - k) ** 2)
    if level == "ratio":
        total = np.where(c + k == 0, 1, c + k)
        return np.asarray(((c - k) / total) ** 2)
    middle = np.cumsum(n_c, -1) - n_c / 2
    return np.asarray((middle[..., :, None] - middle[..., None, :]) ** 2)


def _table(ratings: ArrayLike) -> Floats:
    table = np.asarray(ratings, float)
    if table.ndim != 2:
        raise ValueError(f"The ratings have {table.ndim} axes; expected 2: raters and units.")
    return table
