"""Bias and variance of the targets of TD(0), n-step TD, TD(λ) and Monte Carlo, under value functions of known error.

A target is the value that the critic is regressed on: `Prepared.returns` = advantage + V̂. It is computed by a `PolicyGradient`
with the psi k_step(n) or gae(λ). n = 1 or λ = 0 is TD(0), λ = 1 is Monte Carlo. Its expectation and variance in every state are
solved exactly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from psigrad.errors import UserError, nearest
from psigrad.intervals import Interval, over_seeds
from psigrad.objective import Batch, PolicyGradient
from psigrad.objective.parts import aggregate, ratio
from psigrad.objective.parts.advantage import gae, k_step
from psigrad.objective.parts.critic import value_loss
from psigrad.objective.parts.surrogate import score
from psigrad.tabular import (
    MDP,
    GridWorld,
    Paths,
    epsilon_greedy,
    evaluate,
    policy_model,
    q_values,
    random_walk,
    sample_paths,
    solve,
)
from psigrad.tabular.mdp import FloatArray, IntArray
from psigrad.tabular.simulation import outcomes
from studies import drawing, problems
from studies.drawing import BLUE, INK, RUST
from studies.settings import BiasSettings

N = (1, 2, 4, 8, 16, 32, 64)
LAMBDA = (0.0, 0.5, 0.8, 0.9, 0.95, 0.99, 1.0)
ERRORS = (0.0, 0.25, 0.5, 0.75, 1.0)
PERFECT, SHRUNK, NOISY = "perfect", "shrunk", "noisy"
_NAMED = {PERFECT: "V̂ = V", SHRUNK: "V̂ shrunk", NOISY: "V̂ with noise"}


@dataclass(frozen=True)
class BiasResult:
    """The results of `run`."""

    settings: BiasSettings
    rows: tuple[BiasRow, ...]
    curves: tuple[MSECurve, ...]


def run(settings: BiasSettings) -> BiasResult:
    """Compute every target on one world. Raises `UserError` for invalid settings."""
    s = settings
    check(s)
    world = WORLDS[s.world]()
    found = rows(world, error=s.error, seeds=s.seeds, episodes=s.episodes)
    curves = [curve(world, kind, error) for kind in (SHRUNK, NOISY) for error in ERRORS]
    return BiasResult(s, tuple(found), tuple(curves))


def check(s: BiasSettings) -> None:
    """Raise an error for invalid settings."""
    if s.world not in WORLDS:
        hint = nearest(s.world, WORLDS) or "."
        raise UserError(f"There is no world {s.world!r}; expected {' or '.join(WORLDS)}{hint}")
    if not 0 <= s.error < math.inf:
        raise UserError(f"error is {s.error:g}; expected at least 0 (0 is exact, 1 is as wrong as V̂ = 0).")
    if s.seeds < 1 or s.episodes < 1:
        raise UserError(f"seeds is {s.seeds} and episodes {s.episodes}; expected at least 1 of each.")


@dataclass(frozen=True, eq=False)
class SolvedWorld:
    """A process with a policy, its exact value, and episodes that start in all states with equal probability."""

    mdp: MDP
    policy: FloatArray
    value: FloatArray


def walk() -> SolvedWorld:
    """Return the random walk of 19 states (Sutton and Barto, example 7.1), started in every state. γ = 1."""
    mdp = replace(random_walk(19), start=None)
    policy = np.ones((mdp.n_states, 1))
    return SolvedWorld(mdp, policy, evaluate(mdp, policy))


def grid() -> SolvedWorld:
    """Return a 5×5 grid with a prize in a corner and a trap in the middle, slip 0.2, γ = 0.95.

    The policy moves at random with probability 0.3, otherwise optimally.
    """
    mdp = GridWorld(5, 5, {(0, 4): 1.0, (2, 2): -1.0}, slip=0.2, gamma=0.95).mdp()
    policy = epsilon_greedy(q_values(mdp, solve(mdp).value), 0.3)
    return SolvedWorld(mdp, policy, evaluate(mdp, policy))


WORLDS: dict[str, Callable[[], SolvedWorld]] = {"walk": walk, "grid": grid}


def critics(world: SolvedWorld, error: float) -> dict[str, FloatArray]:
    """Return three kinds of V̂ [S]: V itself; (1 − error)·V; V plus normal noise of equal root mean square error, drawn once."""
    off = -error * world.value
    noise = np.random.default_rng(0).normal(size=off.size) * ~world.mdp.is_terminal
    scale = float(np.sqrt((off**2).sum() / (noise**2).sum()))
    return {PERFECT: world.value, SHRUNK: world.value + off, NOISY: world.value + scale * noise}


@dataclass(frozen=True)
class Target:
    """One estimator: n steps and then V̂, or the λ-weighted mean of all of them."""

    n: int = 0
    """The steps before V̂; 0 for a λ-return."""
    lam: float = 1.0

    @property
    def name(self) -> str:
        """The name in the table."""
        if self.n:
            return "n = 1, TD(0)" if self.n == 1 else f"n = {self.n}"
        return f"λ = {self.lam:g}" + {0.0: ", TD(0)", 1.0: ", MC"}.get(self.lam, "")

    def method(self, gamma: float) -> PolicyGradient:
        """Return the method whose critic learns from this target."""
        psi = k_step(self.n, gamma) if self.n else gae(gamma, self.lam)
        return PolicyGradient(psi, ratio.none, score, aggregate.sequence_sum, critic=value_loss(), name=self.name)


TARGETS = (*(Target(n=n) for n in N), *(Target(lam=lam) for lam in LAMBDA))


@dataclass(frozen=True, eq=False)
class Chain:
    """The moments of one step under a policy: P (S, S), R [S], E[r²] [S], and E[r·f(s')] = paid @ f."""

    model: FloatArray
    reward: FloatArray
    reward_squared: FloatArray
    paid: FloatArray


def chain(world: SolvedWorld) -> Chain:
    """Return the moments of a policy's step, with the reward of each outcome."""
    mdp, n = world.mdp, world.mdp.n_states
    squared, paid = np.zeros(n), np.zeros((n, n))
    for state in np.flatnonzero(~mdp.is_terminal).tolist():
        for action in np.flatnonzero(world.policy[state]).tolist():
            for target, reward, p in zip(*outcomes(mdp, state, action), strict=True):
                p *= world.policy[state, action]
                squared[state] += p * reward**2
                if target >= 0:
                    paid[state, target] += p * reward
    model, rewards = policy_model(mdp, world.policy)
    return Chain(np.asarray(model), rewards, squared, paid)


def exact(target: Target, world: SolvedWorld, step: Chain, value: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return the expectation and variance [S] of a target, for V̂ = `value`.

    n steps: X⁰ = V̂(s), Xⁿ = r + γ·Xⁿ⁻¹(s'). λ: X = r + γ·((1 − λ)·V̂(s') + λ·X(s')). The means and mean squares of both obey
    linear equations in those of the next state.
    """
    gamma, lam = world.mdp.gamma, target.lam
    if target.n:
        mean, square = value, value**2
        for _ in range(target.n):
            square = step.reward_squared + 2 * gamma * step.paid @ mean + gamma**2 * step.model @ square
            mean = step.reward + gamma * step.model @ mean
        return mean, square - mean**2
    eye, c = np.eye(value.size), gamma * (1 - lam)
    mean = _solve(eye - gamma * lam * step.model, step.reward + c * step.model @ value)
    now = step.reward_squared + 2 * c * step.paid @ value + c**2 * step.model @ value**2
    cross = step.paid @ mean + c * step.model @ (value * mean)
    square = _solve(eye - (gamma * lam) ** 2 * step.model, now + 2 * gamma * lam * cross)
    return mean, square - mean**2


def _solve(matrix: FloatArray, right: FloatArray) -> FloatArray:
    return np.asarray(np.linalg.solve(matrix, right), dtype=np.float64)


@dataclass(frozen=True)
class BiasRow:
    """The squared bias and variance of one target under one V̂, means over the non-terminal states."""

    target: str
    critic: str
    n: int
    lam: float
    exact_bias2: float
    bias2: Interval
    """The sampled squared bias, without the variance of the mean; may be below 0."""
    exact_variance: float
    variance: Interval


def rows(world: SolvedWorld, *, error: float, seeds: int, episodes: int) -> list[BiasRow]:
    """Return a row for each target under each V̂.

    Each seed plays `episodes` separate episodes. Raises `UserError` if a state is missed.
    """
    step, values = chain(world), critics(world, error)
    found: dict[tuple[Target, str], list[tuple[float, float]]] = {(t, kind): [] for kind in values for t in TARGETS}
    for seed in range(seeds):
        paths = sample_paths(world.mdp, world.policy, episodes, seed=seed)
        for kind, value in values.items():
            batches = _by_length(world, paths, value)
            for target in TARGETS:
                found[target, kind].append(sample(target, world, paths, value, batches))
    out = []
    for (target, kind), pairs in found.items():
        mean, variance = exact(target, world, step, values[kind])
        alive = ~world.mdp.is_terminal
        bias2, spread = zip(*pairs, strict=True)
        out.append(
            BiasRow(
                target.name,
                kind,
                target.n,
                target.lam,
                float(((mean - world.value)[alive] ** 2).mean()),
                over_seeds(bias2),
                float(variance[alive].mean()),
                over_seeds(spread),
            )
        )
    return out


def sample(
    target: Target, world: SolvedWorld, paths: Paths, value: FloatArray, batches: Sequence[tuple[IntArray, Batch]]
) -> tuple[float, float]:
    """Return the squared bias and the variance of the first step's target, as means over the non-terminal start states."""
    seen = cut_returns(target, world, paths, value) if target.n else whole_returns(target, world, batches)
    first, n = paths.states[:, 0], world.mdp.n_states
    count = np.bincount(first, minlength=n)
    alive = ~world.mdp.is_terminal
    if count[alive].min() < 2:
        rare = int(np.flatnonzero(alive & (count < 2))[0])
        raise UserError(
            f"Fewer than two of {len(first)} episodes started in state {rare}, which leaves no variance; raise --episodes to "
            f"about {20 * int(alive.sum())}."
        )
    mean = np.bincount(first, seen, minlength=n)[alive] / count[alive]
    square = np.bincount(first, seen**2, minlength=n)[alive] / count[alive]
    variance = (square - mean**2) * count[alive] / (count[alive] - 1)
    bias2 = (mean - world.value[alive]) ** 2 - variance / count[alive]
    return float(bias2.mean()), float(variance.mean())


def whole_returns(target: Target, world: SolvedWorld, batches: Sequence[tuple[IntArray, Batch]]) -> FloatArray:
    """Return [N]: the target of the first step of each episode, by the method's own `prepare`."""
    method = target.method(world.mdp.gamma)
    out = np.empty(sum(len(rows) for rows, _ in batches))
    for rows, batch in batches:
        prepared = method.prepare(batch, method.initial_state(), metrics=False)
        assert prepared.returns is not None
        out[rows] = prepared.returns[:, 0].numpy()
    return out


def cut_returns(target: Target, world: SolvedWorld, paths: Paths, value: FloatArray) -> FloatArray:
    """Return [N]: the n-step target of each episode's first step, computed from the first n steps alone."""
    return whole_returns(target, world, [(np.arange(len(paths.lengths)), _batch(world, paths.cut(target.n), value))])


def _batch(world: SolvedWorld, paths: Paths, value: FloatArray) -> Batch:
    return problems.batch_of(paths, world.policy, problems.TabularCritic(value, np.zeros_like(world.policy)))


def _by_length(world: SolvedWorld, paths: Paths, value: FloatArray) -> list[tuple[IntArray, Batch]]:
    """Return batches of episodes with similar lengths, so that few steps are padding."""
    order = np.array_split(np.argsort(paths.lengths, kind="stable"), 16)
    return [(rows, _batch(world, paths.select(rows), value)) for rows in order if rows.size]


@dataclass(frozen=True)
class MSECurve:
    """The exact squared bias plus variance of the λ-return over λ, for V̂ of one kind and error."""

    critic: str
    error: float
    lam: tuple[float, ...]
    mse: tuple[float, ...]

    @property
    def best(self) -> float:
        """The λ with the smallest sum."""
        return self.lam[int(np.argmin(self.mse))]


def curve(world: SolvedWorld, kind: str, error: float, points: int = 201) -> MSECurve:
    """Return the curve from λ = 0, TD(0), to λ = 1, Monte Carlo, in steps of 0.005."""
    step, alive, value = chain(world), ~world.mdp.is_terminal, critics(world, error)[kind]
    lams, mse = np.linspace(0, 1, points).tolist(), []
    for lam in lams:
        mean, variance = exact(Target(lam=lam), world, step, value)
        mse.append(float(((mean - world.value) ** 2 + variance)[alive].mean()))
    return MSECurve(kind, error, tuple(lams), tuple(mse))


def tables(result: BiasResult) -> drawing.Printed:
    """Yield one row for each target, in sections by V̂; then the best λ."""
    table = drawing.new_table(
        f"Targets of a critic on the {result.settings.world}; V̂ has a relative error of {result.settings.error:g}",
        "target",
        "bias²",
        "sampled",
        "variance",
        "sampled",
        "sum",
    )
    for kind, name in _NAMED.items():
        drawing.section(table, name)
        for row in result.rows:
            if row.critic == kind:
                cells = (
                    f"{row.exact_bias2:.4f}",
                    drawing.around(row.bias2, "z.4f"),
                    f"{row.exact_variance:.4f}",
                    drawing.around(row.variance, "z.4f"),
                )
                table.add_row(f" {row.target}", *cells, f"{row.exact_bias2 + row.exact_variance:.4f}")
    yield table
    yield drawing.note("means over the states; the sampled columns have 95 % intervals over seeds")
    best = drawing.new_table("λ with the least bias² + variance, exact", "", *(f"error {error:g}" for error in ERRORS))
    for kind in (SHRUNK, NOISY):
        best.add_row(_NAMED[kind], *(f"{curve.best:.2f}" for curve in result.curves if curve.critic == kind))
    yield best


def picture(found: Mapping[str, Any], path: Path) -> Path:
    """Plot bias² and variance over n and over λ, and their sum over λ for V̂ of growing error."""
    figure, panels = drawing.new_figure(11.5, 3.9, 1, 3)
    rows = [row for row in found["rows"] if row["critic"] == "shrunk"]
    steps, traces = [row for row in rows if row["n"]], [row for row in rows if not row["n"]]
    _shares(panels[0], steps, [row["n"] for row in steps])
    panels[0].set_xscale("log", base=2)
    _named_ticks(panels[0], [row["n"] for row in steps], "steps n before V̂")
    _shares(panels[1], traces, list(range(len(traces))))
    _named_ticks(panels[1], list(range(len(traces))), "λ", [f"{row['lam']:g}" for row in traces])
    panels[0].legend(fontsize=8, frameon=False)
    curves = [curve for curve in found["curves"] if curve["critic"] == "shrunk"]
    for curve, strength in zip(curves, (0.25, 0.4, 0.6, 0.8, 1.0), strict=True):
        best = min(range(len(curve["mse"])), key=curve["mse"].__getitem__)
        panels[2].plot(curve["lam"], curve["mse"], color=BLUE, alpha=strength, linewidth=1.8)
        panels[2].plot(curve["lam"][best], curve["mse"][best], "o", color=RUST, markersize=5)
        text = {"xytext": (0, 3), "textcoords": "offset points", "fontsize": 8, "color": INK}
        panels[2].annotate(f"error {curve['error']:g}", (0.3, curve["mse"][len(curve["mse"]) * 3 // 10]), **text)
    panels[2].set_yscale("log")
    panels[2].yaxis.set_major_formatter("{x:g}")
    panels[2].set_xlabel("λ", color=INK, fontsize=9)
    error = found["settings"]["error"]
    for panel, title in zip(
        panels,
        (f"n-step targets, V̂ = {1 - error:g}·V", f"λ-returns, V̂ = {1 - error:g}·V", "bias² + variance; the best λ"),
        strict=True,
    ):
        drawing.tidy(panel, title, grid="y")
    return drawing.save(figure, path)


def _shares(axes: Any, rows: Sequence[Mapping[str, Any]], x: Sequence[float]) -> None:
    """Plot exact curves, with the sampled figures and their intervals as marks."""
    both = [row["exact_bias2"] + row["exact_variance"] for row in rows]
    axes.plot(x, both, color=INK, linewidth=1.2, linestyle=(0, (4, 3)), label="sum")
    for key, colour, label in (("bias2", BLUE, "bias²"), ("variance", RUST, "variance")):
        axes.plot(x, [row[f"exact_{key}"] for row in rows], color=colour, linewidth=1.8, label=label)
        for at, row in zip(x, rows, strict=True):
            axes.plot([at, at], row[key][1:], color=colour, linewidth=3.5, alpha=0.45)
    axes.set_ylim(bottom=0)


def _named_ticks(axes: Any, places: Sequence[float], label: str, names: Sequence[str] | None = None) -> None:
    axes.set_xticks(places, names or [f"{place:g}" for place in places])
    axes.minorticks_off()
    axes.set_xlabel(label, color=INK, fontsize=9)
