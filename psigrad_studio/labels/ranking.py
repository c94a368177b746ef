"""Bradley–Terry ranking with ties, which estimates the strengths of competitors, with intervals, from pairwise comparisons.

Davidson's model (1970, "On extending the Bradley-Terry model to accommodate ties"): with strengths θ and d = θ_i − θ_j, the
outcomes "i is better", "j is better" and "tie" have log-odds d/2, −d/2 and η. Without ties, η is −∞ and this is Bradley–Terry,
P(i better) = σ(d).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import linalg, sparse, stats
from scipy.optimize import linprog
from scipy.sparse.csgraph import connected_components

Floats = NDArray[np.float64]
Whole = NDArray[np.int64]
WIN, LOSS, TIE = 1.0, 0.0, 0.5


class Undetermined(ValueError):
    """An error for comparisons that do not determine the strengths: some would be infinite, or groups are not connected."""


@dataclass(frozen=True)
class Ranking:
    """Strengths θ with sum 0, in natural logarithms; `tie` is η (−∞ if there were no ties).

    `covariance` is that of θ, and `comparisons` the number of comparisons of each competitor. `prior_sd` is the standard
    deviation of the prior; None if the strengths maximise the likelihood itself.
    """

    strength: Floats
    covariance: Floats
    tie: float
    comparisons: Whole
    log_likelihood: float
    prior_sd: float | None = None

    def interval(self, confidence: float = 0.95) -> tuple[Floats, Floats]:
        """Return (lower ends, upper ends) of the strengths' confidence intervals."""
        reach = _z(confidence) * np.sqrt(np.diag(self.covariance))
        return self.strength - reach, self.strength + reach

    def ranks(self, confidence: float = 0.95) -> list[tuple[int, int]]:
        """Return (best, worst) possible rank of each competitor: 1 + the number surely better, n − the number surely worse."""
        n, v = len(self.strength), self.covariance
        d = self.strength[:, None] - self.strength[None]
        reach = _z(confidence) * np.sqrt(np.maximum(np.diag(v)[:, None] + np.diag(v)[None] - 2 * v, 0))
        return [(1 + int((d[i] + reach[i] < 0).sum()), n - int((d[i] - reach[i] > 0).sum())) for i in range(n)]


def bradley_terry(
    first: ArrayLike,
    second: ArrayLike,
    outcome: ArrayLike,
    n: int,
    *,
    cluster: ArrayLike | None = None,
    prior_sd: float | None = None,
) -> Ranking:
    """Return the strengths of `n` competitors that maximise the likelihood of the outcomes of comparisons (i, j).

    `outcome` is 1 if `first` was better, 0 if `second` was, 0.5 for a tie. Comparisons of one `cluster` (answers to one task,
    pairs from one ranking) may depend on one another. If some cluster has several comparisons, the covariance is the clustered
    sandwich estimate times G / (G - 1) for G clusters, and at least the inverse information in every direction. Otherwise it is
    the inverse information. With `prior_sd`, strengths and η have a normal prior around 0, so a solution always exists. Raises
    `Undetermined` if there is none, and `ValueError` on malformed input.
    """
    i, j, y = np.asarray(first, np.int64), np.asarray(second, np.int64), np.asarray(outcome, float)
    _check(i, j, y, n, prior_sd)
    ties = bool((y == TIE).any())
    if prior_sd is None:
        _must_be_determined(i, j, y, n, ties)
    precision = 0.0 if prior_sd is None else prior_sd**-2
    x, hessian, value = _newton(*_counted(i, j, y), n, ties, precision)
    inverse = _inverse(hessian, n, precision)
    if cluster is not None and np.unique(np.asarray(cluster)).size < len(i):
        scores, _, _ = _scores(x, i, j, y, n, ties)
        _, of = np.unique(np.asarray(cluster), return_inverse=True)
        count = of.max() + 1
        summed = sparse.csr_matrix((np.ones(len(of)), (of, np.arange(len(of)))), shape=(count, len(of))) @ scores
        inverse = _at_least(inverse, (summed.T @ summed).toarray() * count / max(count - 1, 1))
    center = np.eye(n) - 1 / n
    return Ranking(
        strength=x[:n] - x[:n].mean(),
        covariance=center @ inverse[:n, :n] @ center,
        tie=float(x[n]) if ties else -np.inf,
        comparisons=np.bincount(np.concatenate([i, j]), minlength=n),
        log_likelihood=value,
        prior_sd=prior_sd,
    )


def _z(confidence: float) -> float:
    return float(stats.norm.ppf((1 + confidence) / 2))


def _check(i: Whole, j: Whole, y: Floats, n: int, prior_sd: float | None) -> None:
    if not i.shape == j.shape == y.shape or i.ndim != 1 or not i.size:
        raise ValueError(f"first, second, outcome have shapes {i.shape}, {j.shape}, {y.shape}; expected equal lengths above 0.")
    if min(i.min(), j.min()) < 0 or max(i.max(), j.max()) >= n or (i == j).any():
        raise ValueError(f"A comparison has a competitor outside 0 to {n - 1}, or compares one with itself.")
    if not np.isin(y, (WIN, LOSS, TIE)).all():
        raise ValueError("An outcome must be 1 (first), 0 (second) or 0.5 (tie).")
    if prior_sd is not None and not 0 < prior_sd < np.inf:
        raise ValueError(f"prior_sd is {prior_sd}; expected a number above 0.")


def _chances(x: Floats, i: Whole, j: Whole, n: int, ties: bool) -> tuple[Floats, Floats]:
    """Return ([N, 3] log-odds, [N, 3] probabilities) of the outcomes "first is better", "second is better" and "tie"."""
    half = (x[i] - x[j]) / 2
    odds = np.stack([half, -half, np.full(len(i), x[n] if ties else -np.inf)], 1)
    odds = odds - odds.max(1, keepdims=True)
    weight = np.exp(odds)
    total = weight.sum(1, keepdims=True)
    return odds - np.log(total), weight / total


def _scores(x: Floats, i: Whole, j: Whole, y: Floats, n: int, ties: bool) -> tuple[sparse.csr_matrix, Floats, Floats]:
    """Return (gradients [N, n (+1)] of each comparison's log-likelihood, the probabilities, the log-likelihoods)."""
    logs, chance = _chances(x, i, j, n, ties)
    lead = (y - 0.5) - (chance[:, 0] - chance[:, 1]) / 2
    rows = np.arange(len(i))
    parts, at, of = [lead, -lead], [i, j], [rows, rows]
    if ties:
        parts, at, of = [*parts, (y == TIE) - chance[:, 2]], [*at, np.full(len(i), n)], [*of, rows]
    matrix = sparse.csr_matrix((np.concatenate(parts), (np.concatenate(of), np.concatenate(at))), shape=(len(i), len(x)))
    picked = np.where(y == WIN, 0, np.where(y == LOSS, 1, 2))
    return matrix, chance, logs[rows, picked]


def _counted(i: Whole, j: Whole, y: Floats) -> tuple[Whole, Whole, Floats, Floats]:
    """Return the different comparisons (i, j, outcome), and the number of occurrences of each."""
    rows, times = np.unique(np.stack([i, j, (2 * y).astype(np.int64)], 1), axis=0, return_counts=True)
    return rows[:, 0], rows[:, 1], rows[:, 2] / 2, times.astype(float)


def _newton(i: Whole, j: Whole, y: Floats, times: Floats, n: int, ties: bool, precision: float) -> tuple[Floats, Floats, float]:
    """Maximise the log-likelihood by Newton's method. Return (the maximum, the negative Hessian there, the log-likelihood).

    The log-likelihood is concave, so a step may only have to be shortened.
    """
    x = np.zeros(n + ties)

    def likelihood(z: Floats) -> float:
        return float(times @ _scores(z, i, j, y, n, ties)[2])

    def objective(z: Floats) -> float:
        return likelihood(z) - precision * float(z @ z) / 2

    for _ in range(200):
        scores, chance, _ = _scores(x, i, j, y, n, ties)
        gradient = scores.T @ times - precision * x
        hessian = _information(chance, times, i, j, n, ties) + precision * np.eye(len(x))
        step = _inverse(hessian, n, precision) @ gradient
        if np.abs(step).max() < 1e-10:
            break
        scale, before = 1.0, objective(x)
        while objective(x + scale * step) < before - 1e-12 * abs(before) and scale > 1e-10:
            scale /= 2
        x = x + scale * step
    return x, hessian, likelihood(x)


def _information(chance: Floats, times: Floats, i: Whole, j: Whole, n: int, ties: bool) -> Floats:
    """Return the Fisher information of an outcome about (θ, η): its score's covariance, summed over comparisons."""
    lead = (chance[:, 0] - chance[:, 1]) / 2
    dd = times * ((chance[:, 0] + chance[:, 1]) / 4 - lead**2)
    matrix = np.zeros((n + ties, n + ties))
    for a, b, sign in ((i, i, 1), (j, j, 1), (i, j, -1), (j, i, -1)):
        np.add.at(matrix, (a, b), sign * dd)
    if ties:
        dt = -times * lead * chance[:, 2]
        np.add.at(matrix[n], i, dt)
        np.add.at(matrix[n], j, -dt)
        matrix[:n, n] = matrix[n, :n]
        matrix[n, n] = times @ (chance[:, 2] * (1 - chance[:, 2]))
    return matrix


def _inverse(hessian: Floats, n: int, precision: float) -> Floats:
    """Return the inverse of the Hessian; without a prior, on the space of θ with sum 0, since a common shift has no effect."""
    held = hessian.copy()
    if not precision:
        held[:n, :n] += np.trace(hessian) / n**2
    return np.asarray(np.linalg.inv(held), float)


def _at_least(inverse: Floats, spread: Floats) -> Floats:
    """Return the sandwich covariance `inverse` @ `spread` @ `inverse`, raised to `inverse` in directions where it is smaller.

    It would be too small if there are few clusters, or if the strengths fit each of them exactly.
    """
    times, axes = linalg.eigh(spread, np.linalg.inv(inverse))
    return np.asarray(axes * np.maximum(times, 1) @ axes.T, float)


def _must_be_determined(i: Whole, j: Whole, y: Floats, n: int, ties: bool) -> None:
    """Raise `Undetermined` unless the maximum is finite and unique."""
    parts, _ = connected_components(sparse.csr_matrix((np.ones(len(i)), (i, j)), shape=(n, n)), directed=False)
    if parts > 1:
        raise Undetermined(
            f"The {n} competitors form {parts} groups without a comparison between them; get answers that compare the groups."
        )
    if _recedes(i, j, y, n, ties):
        raise Undetermined("Some competitors never lost or never won against the others, or all are ties; get more answers.")


def _recedes(i: Whole, j: Whole, y: Floats, n: int, ties: bool) -> bool:
    """Return True if the likelihood has no finite maximum.

    Then some direction of (θ, η) makes no observed outcome less likely, and one of them more likely. A linear program finds such
    a direction: along it, the log-odds of the observed outcomes of each pair must stay the largest.
    """
    seen = np.stack(_counted(i, j, y)[:3], 1) * (1, 1, 2)
    odds = {2: (0.5, -0.5, 0.0), 0: (-0.5, 0.5, 0.0)} | ({1: (0.0, 0.0, 1.0)} if ties else {})
    rows, columns, values, row = [], [], [], 0
    for a, b, kind in seen:
        for other, against in odds.items():
            if other == kind:
                continue
            for column, here, there in zip((int(a), int(b), n), odds[int(kind)], against, strict=True):
                if here != there:
                    rows.append(row)
                    columns.append(column)
                    values.append(here - there)
            row += 1
    gains = sparse.csr_matrix((values, (rows, columns)), shape=(row, n + ties))
    found = linprog(-np.asarray(gains.sum(0)).ravel(), A_ub=-gains, b_ub=np.zeros(row), bounds=(-1, 1), method="highs")
    return bool(found.status != 0 or -found.fun > 1e-9)
