"""Draws the pictures of docs/tabular.md into docs/images/tabular_*.png and prints the figures that the page quotes.

python docs/make/tabular.py [name …]     names: grid changes convergence bias_variance cliff scaling; all without a name
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import psigrad.tabular as tabular
from psigrad.tabular import GridWorld

IMAGES = Path(__file__).parents[1] / "images"
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "tabular.json"
INK, BLUE, ORANGE, GREEN, RED, PURPLE = "#222222", "#3b6fb6", "#e08214", "#2f8f5b", "#c0392b", "#7d5ba6"
ARROWS = ((0, -0.3), (0.3, 0), (0, 0.3), (-0.3, 0))


def figure(width: float, height: float) -> Figure:
    return Figure(figsize=(width, height), layout="constrained", dpi=130)


def save(drawn: Figure, name: str) -> None:
    drawn.savefig(IMAGES / f"tabular_{name}.png")
    print(f"wrote {IMAGES / f'tabular_{name}.png'}")


def tidy(axes: Axes, title: str, x: str = "", y: str = "") -> None:
    axes.set_title(title, fontsize=11, color=INK, loc="left")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.spines[["top", "right"]].set_visible(False)


def draw_grid(axes: Axes, grid: GridWorld, value: np.ndarray, policy: np.ndarray, title: str) -> None:
    """Values as colours and numbers, the policy as arrows where it expects anything."""
    limit = max(abs(r) for r in grid.prizes.values())
    axes.imshow(value.reshape(grid.rows, grid.columns), cmap="RdYlGn", vmin=-limit, vmax=limit, alpha=0.75)
    for state in range(grid.rows * grid.columns):
        r, c = grid.cell(state)
        if (r, c) in grid.walls:
            axes.add_patch(_square(r, c, "#444444"))
        elif (r, c) in grid.prizes:
            axes.add_patch(_square(r, c, GREEN if grid.prizes[r, c] > 0 else RED))
            axes.text(c, r, f"{grid.prizes[r, c]:+g}", ha="center", va="center", color="white", weight="bold", fontsize=9)
        else:
            axes.text(c, r + 0.27, f"{value[state]:.2f}", ha="center", va="center", fontsize=6.2, color=INK)
            if abs(value[state]) > 1e-9:
                dx, dy = ARROWS[int(policy[state])]
                tail = (c - dx * 0.7, r - 0.12 - dy * 0.7)
                head = (c + dx * 0.7, r - 0.12 + dy * 0.7)
                axes.annotate("", head, tail, arrowprops={"arrowstyle": "->", "lw": 1.1, "color": INK})
    axes.set_xticks(np.arange(-0.5, grid.columns), [""] * (grid.columns + 1))
    axes.set_yticks(np.arange(-0.5, grid.rows), [""] * (grid.rows + 1))
    axes.grid(color="white", lw=1)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_title(title, fontsize=10, color=INK)


def _square(row: int, column: int, colour: str):
    from matplotlib.patches import Rectangle

    return Rectangle((column - 0.5, row - 0.5), 1, 1, color=colour)


def grid() -> None:
    """Value iteration on the default grid, sweep by sweep."""
    world = GridWorld(slip=0.1)
    sweeps = list(tabular.value_iteration(world.mdp()))
    drawn = figure(11, 3.1)
    for axes, k in zip(drawn.subplots(1, 4), (1, 3, 6, len(sweeps)), strict=True):
        title = f"after {k} sweeps" if k > 1 else "after 1 sweep"
        draw_grid(axes, world, sweeps[k - 1].value, sweeps[k - 1].policy, title)
    print(f"value iteration, slip 0.1: {len(sweeps)} sweeps to a bound of {sweeps[-1].error_bound:.1e}")
    save(drawn, "grid")


def changes() -> None:
    """What a discount, slips and a moved trap do to the policy."""
    world = GridWorld(slip=0.1)
    cases = {
        "γ = 0.9, slip 0.1": world,
        "γ = 0.5": replace(world, gamma=0.5),
        "slip 0.4": replace(world, slip=0.4),
        "the trap moved, a wall put up": replace(world, walls=frozenset((2, c) for c in range(2, 8))).moved((3, 4), (1, 4)),
    }
    drawn = figure(11, 3.1)
    for axes, (title, changed) in zip(drawn.subplots(1, 4), cases.items(), strict=True):
        solution = tabular.solve(changed.mdp())
        draw_grid(axes, changed, solution.value, solution.policy, title)
    save(drawn, "changes")


def convergence() -> None:
    """Error of each solver against the work that it did."""
    world = GridWorld(20, 20, {(18, 18): 1.0, (10, 10): -1.0}, slip=0.2, gamma=0.97)
    mdp = world.mdp()
    exact = tabular.solve(mdp).value
    runs = {
        "value iteration": (tabular.value_iteration(mdp, epsilon=1e-11), BLUE),
        "in place (Gauss–Seidel)": (tabular.value_iteration(mdp, in_place=True, epsilon=1e-11), ORANGE),
        "in place, states backwards": (
            tabular.value_iteration(mdp, in_place=True, order=range(400)[::-1], epsilon=1e-11),
            PURPLE,
        ),
        "prioritised sweeping": (tabular.prioritised_sweeping(mdp, epsilon=1e-11), GREEN),
        "policy iteration (rounds)": ((s for s in tabular.policy_iteration(mdp) if s.step == "evaluate"), RED),
    }
    drawn = figure(10, 3.6)
    left, right = drawn.subplots(1, 2)
    for name, (sweeps, colour) in runs.items():
        errors = [np.abs(s.value - exact).max() for s in sweeps]
        left.semilogy(range(1, len(errors) + 1), np.maximum(errors, 1e-13), color=colour, label=name)
        print(f"{name}: {len(errors)} steps, error below 1e-6 after {next(k for k, e in enumerate(errors, 1) if e < 1e-6)}")
    tidy(left, "Error of V on a 20×20 grid", "sweep", "max |V − V*|")
    left.legend(fontsize=7.5, frameon=False)
    sweeps = list(tabular.value_iteration(mdp, epsilon=1e-10))
    k = range(1, len(sweeps) + 1)
    right.semilogy(k, [s.error_bound for s in sweeps], color=INK, ls="--", label="bound γ/(1−γ)·residual")
    right.semilogy(k, [np.abs(s.value - exact).max() for s in sweeps], color=BLUE, label="true error")
    right.semilogy(k, [s.residual for s in sweeps], color=ORANGE, label="residual: not the error")
    tidy(right, "The bound is above the error at every sweep", "sweep of value iteration")
    right.legend(fontsize=8, frameon=False)
    save(drawn, "convergence")


def last(estimates: Iterable[np.ndarray]) -> np.ndarray:
    *_, value = estimates
    return value


def bias_variance() -> None:
    """Bias and variance of targets, and the error of what is learned from ten episodes, on the walk of 19 states."""
    walk = tabular.random_walk(19)
    policy = np.zeros(21, int)
    exact = tabular.evaluate(walk, policy)
    drawn = figure(12, 3.6)
    targets, steps, traces = drawn.subplots(1, 3)
    _draw_targets(targets, walk, policy, exact)
    batches = [list(tabular.rollouts(walk, policy, 10, seed=seed)) for seed in range(40)]
    alphas = np.geomspace(0.008, 1, 18)
    colours = (BLUE, GREEN, ORANGE, RED, PURPLE, INK)
    for n, colour in zip((1, 2, 4, 8, 16, 512), colours, strict=True):
        curve = [_rms(batches, exact, lambda b, n=n, a=a: tabular.td(b, 21, 1.0, n=n, alpha=float(a))) for a in alphas]
        steps.semilogx(alphas, curve, color=colour, label=f"n = {n}" if n < 512 else "Monte Carlo")
        print(f"n = {n}: least error {np.nanmin(curve):.3f} at α = {alphas[int(np.nanargmin(curve))]:.2f}")
    for lam, colour in zip((0.0, 0.4, 0.8, 0.9, 0.95, 1.0), colours, strict=True):
        curve = [
            _rms(batches, exact, lambda b, lam=lam, a=a: tabular.td_lambda(b, 21, 1.0, lam=lam, alpha=float(a))) for a in alphas
        ]
        traces.semilogx(alphas, curve, color=colour, label=f"λ = {lam:g}")
        print(f"λ = {lam}: least error {np.nanmin(curve):.3f} at α = {alphas[int(np.nanargmin(curve))]:.2f}")
    for axes, title in ((steps, "n-step TD: error after 10 episodes"), (traces, "TD(λ): error after 10 episodes")):
        tidy(axes, title, "step size α", "error, mean over states and episodes")
        axes.set_ylim(0.22, 0.85)
        axes.set_xticks([0.01, 0.03, 0.1, 0.3, 1], ["0.01", "0.03", "0.1", "0.3", "1"])
        axes.legend(fontsize=7.5, frameon=False, loc="upper center", ncols=3)
    save(drawn, "bias_variance")


def _draw_targets(axes: Axes, walk: tabular.MDP, policy: np.ndarray, exact: np.ndarray) -> None:
    """Bias² and variance of G^(n) from the middle state under a half-learned V: exact mean, sampled variance."""
    value = last(tabular.td(tabular.rollouts(walk, policy, 20, seed=1), 21, 1.0, alpha=0.2))
    model, rewards = tabular.policy_model(walk, policy)
    episodes = list(tabular.rollouts(walk, policy, 4000, seed=2))
    reach = [1, 2, 4, 8, 16, 32, 64, 128, 256]
    bias, variance = [], []
    starts = range(1, 20)
    for n in reach:
        mean = value.copy()
        for _ in range(n):
            mean = rewards + model @ mean
        bias.append(float(np.mean((mean - exact)[1:20] ** 2)))
        seen: dict[int, list[float]] = {s: [] for s in starts}
        for e in episodes[:1500]:
            first = {int(s): t for t, s in reversed(list(enumerate(e.states[:-1])))}
            found = tabular.n_step_returns(e, value, 1.0, n)
            for s, t in first.items():
                seen[s].append(float(found[t]))
        variance.append(float(np.mean([np.var(seen[s]) for s in starts])))
    axes.loglog(reach, bias, color=BLUE, marker="o", ms=4, label="bias² (exact)")
    axes.loglog(reach, variance, color=ORANGE, marker="o", ms=4, label="variance (1,500 episodes)")
    axes.loglog(reach, np.add(bias, variance), color=INK, ls="--", lw=1, label="both")
    tidy(axes, "Targets G⁽ⁿ⁾ under a half-learned V", "steps n before bootstrapping", "mean over the 19 states")
    axes.legend(fontsize=7.5, frameon=False)
    for n, b, v in zip(reach, bias, variance, strict=True):
        print(f"target n = {n}: bias² {b:.2e}, variance {v:.2e}")


def _rms(batches, exact: np.ndarray, learn) -> float:
    """Error of V over the 19 states, averaged over the episodes of a batch and over the batches; inf when it blew up."""
    with np.errstate(over="ignore", invalid="ignore"):
        errors = [np.sqrt(np.mean((v - exact)[1:20] ** 2)) for batch in batches for v in learn(batch)]
    mean = float(np.mean(errors))
    return mean if mean < 5 else float("nan")


def cliff() -> None:
    """SARSA and Q-learning beside the cliff."""
    mdp = tabular.cliff_walking()
    drawn = figure(11, 3.2)
    curves, where = drawn.subplots(1, 2, width_ratios=(1, 1.35))
    options = {"alpha": 0.5, "epsilon": 0.1}
    for name, learner, colour in (
        ("SARSA", tabular.sarsa, BLUE),
        ("expected SARSA", tabular.expected_sarsa, GREEN),
        ("Q-learning", tabular.q_learning, ORANGE),
    ):
        runs = np.array([[e.undiscounted_return for e in learner(mdp, 500, seed=s, **options)] for s in range(100)])
        smooth = np.convolve(runs.mean(0), np.ones(10) / 10, mode="valid")
        curves.plot(np.arange(smooth.size) + 10, smooth, color=colour, label=name)
        error = runs[:, -100:].mean(1).std() / 10
        print(f"{name}: {runs[:, -100:].mean():.1f} ± {1.96 * error:.1f} in the last 100 of 500 episodes, 100 seeds")
    curves.set_ylim(-100, 0)
    curves.legend(fontsize=8, frameon=False)
    tidy(curves, "Return while learning (ε = 0.1, 100 seeds)", "episode", "sum of rewards")
    where.imshow(np.zeros((4, 12)), cmap="Greys", vmin=0, vmax=1)
    for c in range(1, 11):
        where.add_patch(_square(3, c, "#555555"))
    where.text(5.5, 3, "the cliff: −100, back to the start", ha="center", va="center", color="white", fontsize=9)
    for c, text in ((0, "S"), (11, "G")):
        where.text(c + (0.28 if c else -0.28), 3.22, text, ha="center", va="center", weight="bold")
    for name, learner, colour, shift in (("SARSA", tabular.sarsa, BLUE, -0.07), ("Q-learning", tabular.q_learning, ORANGE, 0.07)):
        *_, final = learner(mdp, 3000, alpha=0.05, epsilon=0.1, seed=0)
        episode = next(tabular.rollouts(mdp, final.policy, 1, seed=0, max_steps=60))
        rows, columns = np.divmod(episode.states, 12)
        where.plot(columns + shift, rows + shift, color=colour, lw=2.5, label=f"{name}: {episode.rewards.sum():.0f}")
    where.set_xticks(np.arange(-0.5, 12), [""] * 13)
    where.set_yticks(np.arange(-0.5, 4), [""] * 5)
    where.grid(color="#cccccc", lw=0.7)
    where.tick_params(length=0)
    where.legend(fontsize=8, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.02), ncols=2)
    tidy(where, "What each has learned, played without exploration")
    save(drawn, "cliff")


def scaling() -> None:
    """Seconds against states, from benchmarks/results/tabular.json."""
    found = json.loads(RESULTS.read_text())
    drawn = figure(9.5, 3.6)
    left, right = drawn.subplots(1, 2)
    ours = [r for r in found["scaling"] if r["kind"] == "field" and r["method"] == "value_iteration"]
    far = [r for r in found["scaling"] if r["kind"] == "far" and r["method"] == "value_iteration"]
    beside = found["beside"]
    left.loglog([r["states"] for r in ours], [r["total_s"] for r in ours], "o-", color=BLUE, ms=4, label="psigrad, many prizes")
    left.loglog([r["states"] for r in far], [r["total_s"] for r in far], "o:", color=BLUE, ms=4, label="psigrad, one far prize")
    peer = [r["peer_total_s"] for r in beside]
    left.loglog([r["states"] for r in beside], peer, "s-", color=RED, ms=4, label="pymdptoolbox, many prizes")
    tidy(left, "Build and solve, error ≤ 1e−6", "states", "seconds")
    left.legend(fontsize=8, frameon=False)
    memory = [r for r in found["scaling"] if r["method"] == "value_iteration" and r["kind"] == "field"]
    right.loglog([r["states"] for r in memory], [r["peak_mb"] for r in memory], "o-", color=BLUE, ms=4, label="psigrad")
    right.loglog([r["states"] for r in beside], [r["peer_peak_mb"] for r in beside], "s-", color=RED, ms=4, label="pymdptoolbox")
    right.axhline(memory[0]["import_mb"], color=INK, lw=0.8, ls="--", label="after the import")
    tidy(right, "Peak memory of the whole process", "states", "MB")
    right.legend(fontsize=8, frameon=False)
    save(drawn, "scaling")


PICTURES = {f.__name__: f for f in (grid, changes, convergence, bias_variance, cliff, scaling)}


if __name__ == "__main__":
    for picture in sys.argv[1:] or PICTURES:
        PICTURES[picture]()
