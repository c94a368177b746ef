"""Means over independent seeds with their intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

from psigrad.tabular.mdp import FloatArray


class Interval(NamedTuple):
    """A mean over seeds and its 95 % interval (Student's t); a single seed has no interval but itself."""

    mean: float
    low: float
    high: float


def interval(values: Sequence[float] | FloatArray) -> Interval:
    """Mean and 95 % interval of independent values."""
    found = np.asarray(values, dtype=np.float64)
    mean = float(found.mean())
    if found.size < 2:
        return Interval(mean, mean, mean)
    reach = float(stats.t.ppf(0.975, found.size - 1) * found.std(ddof=1) / math.sqrt(found.size))
    return Interval(mean, mean - reach, mean + reach)
