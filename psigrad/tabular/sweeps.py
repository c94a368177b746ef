"""The state of a solver after each step (`Sweep`), and bounds on its error."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from psigrad.tabular.bellman import greedy, q_values
from psigrad.tabular.mdp import MDP, FloatArray, IntArray, gamma_is_one
from psigrad.tabular.termination import BoolArray, ending_policy

Step = Literal["evaluate", "improve", "back up"]
UNIT = 2.0**-53
_TIE = 1e-9  # wider than rounding, which grows over the sweeps


@dataclass(frozen=True, eq=False)
class Sweep:
    """One step of a solver: the values after it, and their error bounds.

    V + low <= target <= V + high in every state that is not terminal. The target of a step `evaluate` is V_π of the current
    policy. The target of `improve` and `back up` is V*.
    """

    mdp: MDP
    iteration: int
    """The number of the step, from 1."""
    step: Step
    """evaluate: new values of the current policy. improve: a new policy, same values. back up: a Bellman optimality backup."""
    value: FloatArray
    """[S]: V after this step."""
    residual: float
    """max_s |V_new(s) − V_old(s)| of this step; for `improve` max_s |max_a Q(s, a) − V(s)|."""
    low: float
    high: float
    chosen: IntArray | FloatArray | None = None
    """The solver's current policy; None if the solver has only values."""
    changed: int = 0
    """The number of states whose action changed (for `improve`)."""

    @property
    def error_bound(self) -> float:
        """A proven bound on max_s |V(s) − target(s)|; infinite if none is known."""
        return max(-self.low, self.high)

    @cached_property
    def policy(self) -> IntArray | FloatArray:
        """The solver's current policy, or the greedy policy of these values.

        At γ = 1, of several actions with equal value, the greedy policy takes one that leads towards an end.
        """
        return self._greedy[0] if self.chosen is None else self.chosen

    @property
    def leads_nowhere(self) -> BoolArray:
        """[S]: True if γ = 1 and no greedy action leads towards an end.

        In such a state, the return of `policy` may differ from V.
        """
        if self.chosen is not None or not gamma_is_one(self.mdp.gamma):
            return np.zeros(self.mdp.n_states, bool)
        return ~self._greedy[1]

    @cached_property
    def _greedy(self) -> tuple[IntArray, BoolArray]:
        mdp, q = self.mdp, q_values(self.mdp, self.value)
        if not gamma_is_one(mdp.gamma):
            return greedy(q), np.ones(mdp.n_states, bool)
        best = q.max(axis=1, keepdims=True)
        return ending_policy(mdp.transitions, mdp.end_probability, mdp.is_terminal, q >= best - _TIE * (1 + np.abs(best)))


def rounding(mdp: MDP, value: FloatArray) -> float:
    """Return a bound on the rounding error of a backup: (n + 3)·u·(max|R| + γ·max|V|).

    n is the largest number of entries in a row of the transitions, and u = 2⁻⁵³.
    """
    longest = int(np.diff(mdp.transitions.indptr).max()) if mdp.is_sparse else mdp.n_states
    largest_value = max(float(value.max()), -float(value.min()))
    return (longest + 3) * UNIT * (_largest_reward(mdp) + mdp.gamma * largest_value)


def _largest_reward(mdp: MDP) -> float:
    return max(float(mdp.rewards.max()), -float(mdp.rewards.min()))


def change_bounds(
    mdp: MDP, change: FloatArray, slack: float, synchronous: bool, steps: float | None = None
) -> tuple[float, float]:
    """Return the error bounds (low, high) of V after a sweep that changed it by d = `change` [S].

    γ < 1: ∓γ/(1 − γ)·max|d|. After a synchronous sweep: γ/(1 − γ)·min d and γ/(1 − γ)·max d, which is never wider. γ = 1:
    ∓(n − 1)·max|d| with n = `steps`, the largest expected number of steps to the end. `slack`, the rounding error of one backup,
    widens the bounds.
    Sources: MacQueen 1966; Bertsekas, Dynamic Programming and Optimal Control, volume 2, proposition 1.3.1.
    """
    least, most = float(change.min()), float(change.max())
    if gamma_is_one(mdp.gamma):
        if steps is None or not np.isfinite(steps):
            return -np.inf, np.inf
        wide = (steps - 1) * max(most, -least) + steps * slack
        return -wide, wide
    if not synchronous:
        least, most = -max(most, -least), max(most, -least)
    elif mdp.is_terminal.any() or mdp.end is not None:
        least, most = min(least, 0.0), max(most, 0.0)  # a step that ends the episode propagates a change of 0
    return (mdp.gamma * least - slack) / (1 - mdp.gamma), (mdp.gamma * most + slack) / (1 - mdp.gamma)


def residual_bounds(mdp: MDP, residual: FloatArray, slack: float, steps: float | None = None) -> tuple[float, float]:
    """Return the error bounds (low, high) of any V from its Bellman residual TV − V [S]: residual/(1 − γ), widened by `slack`.

    At γ = 1: n·residual with n = `steps`.
    """
    scale = steps if gamma_is_one(mdp.gamma) else 1 / (1 - mdp.gamma)
    if scale is None or not np.isfinite(scale):
        return -np.inf, np.inf
    return scale * (min(float(residual.min()), 0.0) - slack), scale * (max(float(residual.max()), 0.0) + slack)


def wanted_error(epsilon: float | None, value: FloatArray) -> float:
    """Return the error that a solver must reach: `epsilon`; if that is None, 1e-8 of the largest value, and at least 1e-8.

    The default is relative, since float64 cannot prove a fixed absolute error for large values.
    """
    return epsilon if epsilon is not None else 1e-8 * max(1.0, float(np.abs(value).max(initial=0.0)))


def is_finished(sweep: Sweep, epsilon: float | None, slack: float) -> bool:
    """Return True if the error bound is at most `wanted_error`. If there is no bound (γ = 1), the residual is compared instead.

    Raises ValueError if float64 cannot reach that error.
    """
    epsilon = wanted_error(epsilon, sweep.value)
    if not np.isfinite(sweep.error_bound):
        return sweep.residual <= max(epsilon, slack)
    if sweep.error_bound <= epsilon:
        return True
    if sweep.residual <= slack and epsilon > 0:
        raise ValueError(
            f"epsilon is {epsilon:g}, but sweeps in float64 can only prove a bound of {sweep.error_bound:.1e} here; give a "
            "larger epsilon, or 0 to continue until nothing changes."
        )
    return sweep.residual == 0
