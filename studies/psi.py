"""Bias and variance of the policy-gradient estimate, for each form of Ψ, against the exact gradient of a small process.

Every form is a `PolicyGradient` with another psi and otherwise the same parts: −log π weighted by Ψ, summed over the steps of an
episode, averaged over a batch. Its exact mean and variance come from the enumeration of all episodes. The tables also contain the
figures of sampled batches.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from psigrad.errors import UserError
from psigrad.intervals import Interval, over_seeds
from psigrad.objective import Batch, PolicyGradient, Prepared
from psigrad.objective.batch import group_sum
from psigrad.objective.parts import aggregate, ratio
from psigrad.objective.parts.advantage import (
    Psi,
    StatefulPsi,
    action_advantage,
    action_value,
    batch_mean,
    gae,
    k_step,
    leave_one_out,
    moving_average,
    needs_of,
    reward_to_go,
    td_residual,
    total_return,
)
from psigrad.objective.parts.critic import value_loss
from psigrad.objective.parts.surrogate import score
from psigrad.records.report.plots import GREY
from psigrad.tabular import Paths, all_paths, sample_paths
from psigrad.tabular.mdp import FloatArray
from studies import drawing, problems
from studies.drawing import BLUE, GREEN, INK, PINK, RUST
from studies.problems import EXACT, ROUGH, Problem
from studies.settings import PsiSettings

# The labels and colours of the forms with each critic, in tables and pictures.
_NAMED = {"": "no critic", EXACT: "exact V and Q", ROUGH: "rough V and Q"}
_DRAWN = {"": (GREY, "no critic"), EXACT: (BLUE, "exact critic"), ROUGH: (RUST, "rough critic")}
_BATCHES = [2.0**k for k in range(15)]


@dataclass(frozen=True)
class PsiResult:
    """The results of `run`."""

    settings: PsiSettings
    gradient_length: float
    """‖∇J‖."""
    rows: tuple[PsiRow, ...]


def run(settings: PsiSettings) -> PsiResult:
    """Compute every form of Ψ on `line_walk`. Raises `UserError` for invalid settings."""
    s = settings
    check(s)
    given = problems.problem(problems.line_walk(gamma=s.discount, at_the_end=s.at_the_end), critic_error=s.critic_error)
    found = rows(given, forms(s.discount), seeds=s.seeds, episodes=s.episodes, batch_size=s.batch)
    return PsiResult(s, float(np.linalg.norm(given.gradient)), tuple(found))


def check(s: PsiSettings) -> None:
    """Raise an error for invalid settings."""
    if s.seeds < 1:
        raise UserError(f"seeds is {s.seeds}; expected at least 1; intervals need at least 2.")
    if s.batch < 2:
        raise UserError(f"batch is {s.batch}; expected at least 2 episodes, so that they can be compared with each other.")
    if s.episodes < 2 * s.batch:
        raise UserError(f"episodes is {s.episodes}; expected at least two batches of {s.batch}; give more --episodes.")
    if not 0 < s.discount <= 1:
        raise UserError(f"discount is {s.discount:g}; expected a number above 0 and at most 1.")
    if not 0 <= s.critic_error < math.inf:
        raise UserError(f"critic_error is {s.critic_error:g}; expected a standard deviation of at least 0.")


@dataclass(frozen=True)
class PsiForm:
    """One choice of Ψ: its common name, the part of the library, and the quality of its critic."""

    name: str
    psi: Psi
    critic: str = ""
    """The critic: "", "exact" (the true V and Q) or "rough"."""

    @property
    def method(self) -> PolicyGradient:
        """The method with this Ψ."""
        critic = value_loss() if "value" in needs_of(self.psi) else None
        return PolicyGradient(self.psi, ratio.none, score, aggregate.sequence_sum, critic=critic, name=self.name)


def minus_action_value(batch: Batch) -> Tensor:
    """Return G_t − Q(s_t, a_t): a baseline that wrongly depends on the action. The expected gradient is 0.

    Formula: A_t = G_t − Q(s_t, a_t)
    """
    return reward_to_go()(batch) - action_value(batch)


@dataclass(frozen=True)
class reward_to_go_minus_others:
    """The reward to go minus that of the group's other episodes at the same step: a baseline for each step without a critic.

    Formula: A_t = G_t − (1/(K−1))·Σ_{j≠i} G_{j,t}
    """

    gamma: float = 1.0
    """The discount per step."""
    needs: ClassVar[frozenset[str]] = frozenset({"group"})

    def __call__(self, batch: Batch) -> Tensor:
        """Return the [N, T] reward to go minus the mean of the rest of the group at the same step."""
        to_go = reward_to_go(self.gamma)(batch)
        sums = torch.stack([group_sum(column, batch.group) for column in to_go.T], dim=1)
        steps = torch.stack([group_sum(column, batch.group) for column in batch.mask.to(to_go.dtype).T], dim=1)
        return to_go - (sums - to_go) / (steps - 1).clamp(min=1)


def forms(gamma: float) -> list[PsiForm]:
    """Return the forms of Ψ to compare, the simplest first."""
    plain = [
        PsiForm("total return R", total_return(gamma)),
        PsiForm("R − moving average", moving_average()),
        PsiForm("R − batch mean", batch_mean),
        PsiForm("R − others' mean", leave_one_out),
        PsiForm("reward to go G", reward_to_go(gamma)),
        PsiForm("G − others' mean", reward_to_go_minus_others(gamma)),
    ]
    with_critic: list[tuple[str, Psi]] = [
        ("G − V", gae(gamma, 1.0)),
        ("GAE, λ = 0.9", gae(gamma, 0.9)),
        ("GAE, λ = 0.5", gae(gamma, 0.5)),
        ("2 steps, then V", k_step(2, gamma)),
        ("TD residual", td_residual(gamma)),
        ("Q", action_value),
        ("A = Q − V", action_advantage),
    ]
    found = [PsiForm(name, psi, critic) for critic in (EXACT, ROUGH) for name, psi in with_critic]
    return [*plain, *found, PsiForm("G − Q (wrong)", minus_action_value, EXACT)]


@dataclass(frozen=True)
class PsiRow:
    """The figures of one form. Biases are in units of the length of the exact gradient, variances of a single episode."""

    name: str
    critic: str
    exact_bias: float
    """‖E ĝ − ∇J‖ / ‖∇J‖, by enumeration."""
    exact_along: float
    """⟨E ĝ, ∇J⟩ / ‖∇J‖² − 1: the part of the bias along the gradient, by enumeration."""
    along: Interval
    """The same, sampled."""
    p: float | None
    """The probability of a sampled mean this far from ∇J, over all parameters, if there is no bias; None: too few batches.
    """
    exact_variance: float
    """Batch size × trace of the covariance of ĝ, exact."""
    variance: Interval
    """The same, sampled."""
    error: float
    """√E‖ĝ − ∇J‖² / ‖∇J‖ of one batch, exact: bias and variance together."""


def moments(form: PsiForm, given: Problem, batch_size: int, batches: int) -> tuple[FloatArray, float]:
    """Return E ĝ [S·A] and batch size × tr Cov ĝ, exact, for the mean over `batch_size` episodes.

    Forms that use one episode at a time are enumerated. Forms that compare episodes follow from moments of one episode, since
    their ĝ consists of sample covariances of a return and a score (`_compare`, `_average`).
    """
    paths, p = all_paths(given.mdp, given.policy)
    if isinstance(form.psi, moving_average):
        return _average(form.psi.decay, given, paths, p, batch_size, batches)
    if isinstance(form.psi, reward_to_go_minus_others):
        to_go = reward_to_go(form.psi.gamma)(problems.batch_of(paths, given.policy)).numpy()
        return _compare(to_go, [np.eye(to_go.shape[1])[t] for t in range(to_go.shape[1])], given, paths, p, batch_size)
    if form.psi in (batch_mean, leave_one_out):
        mean, variance = _compare(paths.rewards.sum(1, keepdims=True), [np.ones(1)], given, paths, p, batch_size)
        shrink = (batch_size - 1) / batch_size if form.psi is batch_mean else 1.0
        return shrink * mean, shrink**2 * variance
    g = _of_each(form, given, paths)
    mean = p @ g
    return mean, float(p @ ((g - mean) ** 2).sum(1))


def _compare(
    x: FloatArray, steps: Sequence[FloatArray], given: Problem, paths: Paths, p: FloatArray, n: int
) -> tuple[FloatArray, float]:
    """Return moments of ĝ = Σ_t c(x_t, s_t), with c the sample covariance over n episodes.

    x [N, t] are returns and s_t scores (E s_t = 0). The score s_t is the sum over the steps `steps[t]`.
    For four numbers of an episode,

        n·Cov(c(x, y), c(z, w)) = E[x̃ỹz̃w̃] − σ_xy·σ_zw + (σ_xz·σ_yw + σ_xw·σ_yz) / (n − 1)

    x̃ = x − E x. The mean of the other episodes as a baseline gives exactly ĝ; the batch mean gives (n − 1)/n of it.
    """
    centred = x - p @ x
    scores = [problems.gradients(paths.mask * weight, paths, given.policy, 1) for weight in steps]
    whole = np.sum([centred[:, t, None] * s for t, s in enumerate(scores)], axis=0)
    mean = p @ whole
    variance = p @ (whole**2).sum(1) - mean @ mean
    for t, s in enumerate(scores):
        for u, other in enumerate(scores):
            same = (p * centred[:, t]) @ centred[:, u] * (p @ (s * other).sum(1))
            crossed = ((p * centred[:, t]) @ other) @ ((p * centred[:, u]) @ s)
            variance += (same + crossed) / (n - 1)
    return mean, float(variance)


def _average(decay: float, given: Problem, paths: Paths, p: FloatArray, n: int, batches: int) -> tuple[FloatArray, float]:
    """Return moments of ĝ = mean of (R − b)·S, with b independent of the batch. The variance is the mean over the batches."""
    reward, s = paths.rewards.sum(1), problems.gradients(paths.mask.astype(np.float64), paths, given.policy, 1)
    square, mu, mean = (s**2).sum(1), float(p @ reward), (p * reward) @ s
    first, second = _average_moments(decay, mu, float(p @ (reward - mu) ** 2) / n, batches)
    raw = p @ (reward**2 * square) - 2 * first * (p @ (reward * square)) + second * (p @ square)
    return mean, float(raw - mean @ mean)


def _average_moments(decay: float, mu: float, spread: float, batches: int) -> tuple[float, float]:
    """Return the mean over the batches of E b and E b².

    b is a moving average of batch means with expectation mu and variance spread.
    """
    k = np.arange(1, batches)
    weights_squared = (1 - decay) ** 2 * (1 - decay ** (2 * k)) / (1 - decay**2) / (1 - decay**k) ** 2
    return mu * (batches - 1) / batches, float((mu**2 + spread * weights_squared).sum() / batches)


def _of_each(form: PsiForm, given: Problem, paths: Paths) -> FloatArray:
    """Return [N, S·A]: ĝ of each single episode."""
    method, batch = form.method, problems.batch_of(paths, given.policy, given.critics[form.critic])
    prepared = method.prepare(batch, method.initial_state(), metrics=False)
    return problems.gradients(problems.step_weights(method, prepared, 1), paths, given.policy, 1)


def estimates(form: PsiForm, given: Problem, paths: Paths, batch_size: int) -> FloatArray:
    """Return [N / batch_size, S·A]: ĝ of each batch, by the method's own `prepare` and `loss`."""
    groups = np.arange(len(paths.lengths)) // batch_size
    method, batch = form.method, problems.batch_of(paths, given.policy, given.critics[form.critic], groups)
    prepared = method.prepare(batch, method.initial_state(), metrics=False)
    if form.psi is batch_mean or isinstance(form.psi, StatefulPsi):
        prepared = replace(prepared, advantage=_in_batches(method, batch, batch_size))
    return problems.gradients(problems.step_weights(method, prepared, batch_size), paths, given.policy, batch_size)


def _in_batches(method: PolicyGradient, batch: Batch, size: int) -> Tensor:
    """Return [N, T]: the advantages of consecutive batches. Each batch passes its state to the next."""
    state, parts = method.initial_state(), []
    for first in range(0, len(batch.mask), size):
        prepared: Prepared = method.prepare(batch.select(torch.arange(first, first + size)), state, metrics=False)
        state = prepared.state
        parts.append(prepared.advantage)
    return torch.cat(parts)


def rows(given: Problem, chosen: Sequence[PsiForm], *, seeds: int, episodes: int, batch_size: int) -> list[PsiRow]:
    """Return one row for each form. Every seed plays `episodes` separate episodes, the same ones for every form."""
    batches = episodes // batch_size
    played = [sample_paths(given.mdp, given.policy, batches * batch_size, seed=seed) for seed in range(seeds)]
    return [_row(form, given, played, batch_size) for form in chosen]


def _row(form: PsiForm, given: Problem, played: Sequence[Paths], size: int) -> PsiRow:
    truth = given.gradient
    length = float(np.linalg.norm(truth))
    found = [estimates(form, given, paths, size) for paths in played]
    mean, variance = moments(form, given, size, len(found[0]))
    return PsiRow(
        name=form.name,
        critic=form.critic,
        exact_bias=float(np.linalg.norm(mean - truth)) / length,
        exact_along=float(mean @ truth) / length**2 - 1,
        along=over_seeds([float(g.mean(0) @ truth) / length**2 - 1 for g in found]),
        p=no_bias(np.concatenate(found), truth),
        exact_variance=variance,
        variance=over_seeds([size * float(g.var(0, ddof=1).sum()) for g in found]),
        error=math.sqrt(float(((mean - truth) ** 2).sum()) + variance / size) / length,
    )


def no_bias(found: FloatArray, truth: FloatArray) -> float | None:
    """Return p of the hypothesis E ĝ = truth, from independent estimates [n, d], by Hotelling's T².

    Return None if n is too small for d. T² = n·(ḡ − truth)ᵀ·Cov⁺·(ḡ − truth), and T²·(n − r) / (r·(n − 1)) is F(r, n − r), with r
    the rank of Cov.
    """
    away, n = found.mean(0) - truth, len(found)
    values, vectors = np.linalg.eigh(np.cov(found.T))
    kept = values > 1e-9 * values.max()
    rank = int(kept.sum())
    if n <= rank + 1:
        return None
    t2 = n * float((((vectors[:, kept].T @ away) ** 2) / values[kept]).sum())
    return float(stats.f.sf(t2 * (n - rank) / (rank * (n - 1)), rank, n - rank))


def tables(result: PsiResult) -> drawing.Printed:
    """Yield one row for each form of Ψ, in sections by critic."""
    title = f"The policy gradient by Ψ; ‖∇J‖ = {result.gradient_length:.3f}, batches of {result.settings.batch} episodes"
    table = drawing.new_table(title, "Ψ", "bias", "along ∇J", "p", "variance", "sampled", "error")
    for critic, name in _NAMED.items():
        drawing.section(table, name)
        for row in result.rows:
            if row.critic == critic:
                bias = "0" if row.exact_bias < 1e-9 else f"{row.exact_bias:.3g}"
                spread = (drawing.around(row.along, "+z.3f"), _p(row.p), f"{row.exact_variance:.4g}", _three(row.variance))
                table.add_row(f" {row.name}", bias, *spread, f"{row.error:.2f}")
    yield table
    yield drawing.note(
        "bias      ‖E ĝ − ∇J‖ / ‖∇J‖, exact by enumeration",
        "along ∇J  bias along ∇J, divided by ‖∇J‖; sampled, 95 % interval over seeds",
        "p         p-value of the hypothesis that there is no bias",
        "variance  trace of the covariance of ĝ for one episode, exact and sampled",
        "error     √E‖ĝ − ∇J‖² / ‖∇J‖ of one batch",
    )


def _p(value: float | None) -> str:
    return "–" if value is None else "<.001" if value < 1e-3 else f"{value:.3f}"


def _three(found: Interval) -> str:
    """Return a positive mean with three digits, and its interval with as many decimal places."""
    return drawing.around(found, f".{max(0, 2 - math.floor(math.log10(found.mean))) if found.mean > 0 else 2}f")


def picture(found: Mapping[str, Any], path: Path) -> Path:
    """Plot the variance of each form (left), and the error over the batch size, where bias appears as a floor (right)."""
    figure, (left, right) = drawing.new_figure(10.5, 5.4, 1, 2, width_ratios=(1.15, 1))
    rows = found["rows"]
    least, most = (f(row["exact_variance"] for row in rows) for f in (min, max))
    for y, row in enumerate(reversed(rows)):
        colour, biased = _DRAWN[row["critic"]][0], row["exact_bias"] > 1e-9
        left.plot([least / 4, row["exact_variance"]], [y, y], color=colour, linewidth=5, alpha=0.25, solid_capstyle="butt")
        _, low, high = row["variance"]
        left.plot([low, high], [y, y], color=colour, linewidth=2.4)
        note = f"{row['exact_variance']:.3g}" + (f"   bias {row['exact_bias']:.0%}" if biased else "")
        left.text(max(high, row["exact_variance"]) * 1.12, y, note, va="center", fontsize=8, color=INK)
    left.set_yticks(range(len(rows)), [row["name"] for row in reversed(rows)])
    for colour, label in _DRAWN.values():
        left.plot([], [], color=colour, linewidth=5, alpha=0.6, label=label)
    left.set_xscale("log")
    left.set_xlim(least / 4, most * 6)
    left.xaxis.set_major_formatter("{x:g}")
    left.legend(fontsize=8, frameon=False, loc="upper right", bbox_to_anchor=(1.0, 0.7))
    drawing.tidy(left, "Variance of the gradient of one episode", grid="x")
    shown = [
        ("reward to go G", ""),
        ("G − V", "rough"),
        ("GAE, λ = 0.9", "rough"),
        ("TD residual", "rough"),
        ("A = Q − V", "rough"),
    ]
    for (name, critic), colour in zip(shown, (GREY, BLUE, GREEN, RUST, PINK), strict=True):
        row = next(row for row in rows if (row["name"], row["critic"]) == (name, critic))
        size = found["gradient_length"]
        curve = [math.sqrt(row["exact_bias"] ** 2 + row["exact_variance"] / n / size**2) for n in _BATCHES]
        right.plot(_BATCHES, curve, color=colour, linewidth=1.8, label=name)
    right.set_xscale("log", base=2)
    right.set_yscale("log")
    right.set_xticks(_BATCHES[::2], [f"{n:,.0f}" for n in _BATCHES[::2]])
    right.yaxis.set_major_formatter("{x:g}")
    drawing.tidy(right, "Error of the estimate with the rough critic, over ‖∇J‖", "y", "episodes in a batch", legend=True)
    return drawing.save(figure, path)
