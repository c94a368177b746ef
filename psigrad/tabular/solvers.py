"""Dynamic programming, one step at a time. Every solver is a generator that yields a `Sweep` after each step.

    evaluation         V ← R_π + γ·P_π·V                        policy_evaluation; exact: bellman.evaluate
    value iteration    V ← max_a [R(s, a) + γ·Σ_s' P·V(s')]     value_iteration, prioritised_sweeping
    policy iteration   evaluate π, then improve it, repeat      policy_iteration
    modified           back up, then m sweeps of evaluation     modified_policy_iteration

A generator ends when its error bound is at most `epsilon`; None: 1e-8 of the largest value, and at least 1e-8. If `value` is
given, the solver starts from it (a warm start). Sources: Bellman 1957; Howard 1960; Puterman and Shin 1978; Moore and Atkeson
1993; Puterman 1994, chapters 6 and 7.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import ArrayLike
from scipy import sparse

from psigrad.tabular import bellman
from psigrad.tabular.mdp import MDP, FloatArray, IntArray, Matrix, gamma_is_one
from psigrad.tabular.sweeps import Step, Sweep, change_bounds, is_finished, residual_bounds, rounding, wanted_error
from psigrad.tabular.termination import safe_policy

Method = Literal["policy_iteration", "value_iteration", "modified_policy_iteration"]
EXACT_UP_TO = 5_000


@dataclass(frozen=True, eq=False)
class Solution:
    """The solution of an MDP: the values and the policy, with a bound on their error."""

    value: FloatArray
    """[S]: V*, within error_bound."""
    policy: IntArray
    """[S]: greedy in `value`."""
    q: FloatArray
    """(S, A): Q of `value`."""
    iterations: int
    """The number of steps that the solver yielded."""
    error_bound: float
    """An upper bound on max_s |V − V*|. At γ = 1 it bounds the error of V as the value of `policy`, which no action improves."""
    method: Method


def policy_evaluation(
    mdp: MDP, policy: ArrayLike, *, value: ArrayLike | None = None, in_place: bool = False, epsilon: float | None = None
) -> Iterator[Sweep]:
    """Sweep V ← R_π + γ·P_π·V towards V_π, for all states from the old values. `in_place` uses each new value at once.

    At γ = 1, the error bound uses the policy's expected number of steps. If that is infinite, the residual decides instead.
    """
    _check_epsilon(epsilon)
    policy = bellman.check_policy(mdp.n_states, mdp.n_actions, policy)
    old = bellman.check_value(mdp, value)
    model, rewards = bellman.policy_model(mdp, policy)
    steps = float(bellman.expected_steps(mdp, policy).max()) if gamma_is_one(mdp.gamma) else None
    backup = _in_place(model, rewards[:, None], mdp.gamma, range(mdp.n_states)) if in_place else _of_chain(mdp, model, rewards)
    yield from _repeat(mdp, "evaluate", backup, old, not in_place, epsilon, steps, policy)


def _repeat(
    mdp: MDP,
    step: Step,
    backup: Callable[[FloatArray], FloatArray],
    old: FloatArray,
    synchronous: bool,
    epsilon: float | None,
    steps: float | None = None,
    policy: bellman.Policy | None = None,
) -> Iterator[Sweep]:
    """Repeat V ← backup(V), and yield each sweep, until the error bound is at most `epsilon`."""
    for iteration in itertools.count(1):
        new = backup(old)
        change, slack = new - old, rounding(mdp, new)
        bounds = change_bounds(mdp, change, slack, synchronous, steps)
        sweep = Sweep(mdp, iteration, step, new, _largest(change), *bounds, policy)
        yield sweep
        if is_finished(sweep, epsilon, slack):
            return
        old = new


def value_iteration(
    mdp: MDP,
    *,
    value: ArrayLike | None = None,
    in_place: bool = False,
    order: ArrayLike | None = None,
    epsilon: float | None = None,
) -> Iterator[Sweep]:
    """Sweep V ← max_a Q(s, a) towards V*, for all states from the old values. `in_place` uses new values at once (Gauss–Seidel).

    `order` [S] is the order of the states with `in_place`. At γ = 1 and from V = 0, the values of sweep k are the best expected
    sums of rewards in k steps.
    """
    _check_epsilon(epsilon)
    old = bellman.check_value(mdp, value)
    if order is not None and (not in_place or sorted(np.asarray(order).tolist()) != list(range(mdp.n_states))):
        raise ValueError("order needs in_place=True and every state once; remove order, or give a permutation of the states.")
    states = range(mdp.n_states) if order is None else np.asarray(order).tolist()
    backup = _in_place(mdp.transitions, mdp.rewards, mdp.gamma, states) if in_place else _best_of(mdp)
    yield from _repeat(mdp, "back up", backup, old, not in_place, epsilon)


def policy_iteration(
    mdp: MDP, *, policy: ArrayLike | None = None, value: ArrayLike | None = None, exact: bool = True, epsilon: float = 1e-10
) -> Iterator[Sweep]:
    """Evaluate the policy, improve it greedily, repeat until no action changes. Each round yields an `evaluate` and an `improve`.

    The first policy is `policy`, or the greedy one of `value` or of zeros. At γ = 1, the default is a policy that ends or stays
    without reward, from which policy iteration reaches V*. With exact=False, a policy is evaluated by sweeps up to `epsilon`, and
    each sweep is yielded.
    """
    current = _first_policy(mdp, policy, value)
    old, iteration = bellman.check_value(mdp, value), 0
    while True:
        if exact:
            new = bellman.evaluate(mdp, current)
            iteration += 1
            yield _record_evaluation(mdp, iteration, old, new, current)
        else:
            new = old
            for sweep in policy_evaluation(mdp, current, value=old, epsilon=epsilon):
                iteration += 1
                new = sweep.value
                yield Sweep(mdp, iteration, "evaluate", new, sweep.residual, sweep.low, sweep.high, current)
        q = bellman.q_values(mdp, new)
        improved = bellman.greedy(q, current)
        changed = int((improved != current).sum())
        gap = q.max(axis=1) - new
        gap[mdp.is_terminal] = 0.0
        steps = None if changed or not gamma_is_one(mdp.gamma) else _finite_steps(mdp, improved)
        iteration += 1
        bounds = residual_bounds(mdp, gap, rounding(mdp, new), steps)
        yield Sweep(mdp, iteration, "improve", new, _largest(gap), *bounds, improved, changed)
        # Values must grow: if the gain is below the evaluation's error, actions of equal value could be swapped for ever.
        stalled = iteration > 2 and new.sum() <= old.sum() if exact else float(gap.max()) <= 2 * epsilon
        if not changed or stalled:
            return
        current, old = improved, new


def modified_policy_iteration(
    mdp: MDP, *, value: ArrayLike | None = None, sweeps: int = 20, epsilon: float | None = None
) -> Iterator[Sweep]:
    """Back up V ← max_a Q, then evaluate its greedy policy by `sweeps` sweeps, and repeat.

    A sweep for one policy costs 1/A of a backup. Each round yields a `back up`, whose error bound decides about the end, and an
    `evaluate`. With 0 sweeps, this is value iteration, and with many it approaches policy iteration.
    """
    _check_epsilon(epsilon)
    if sweeps < 0:
        raise ValueError(f"sweeps is {sweeps}; expected the number of evaluation sweeps between two backups, 0 or more.")
    old = bellman.check_value(mdp, value)
    iteration = 0
    while True:
        q = bellman.q_values(mdp, old)
        new = np.asarray(q.T.max(axis=0))
        change = new - old
        slack = rounding(mdp, new)
        iteration += 1
        sweep = Sweep(mdp, iteration, "back up", new, _largest(change), *change_bounds(mdp, change, slack, True))
        yield sweep
        if is_finished(sweep, epsilon, slack):
            return
        old = new
        if sweeps:
            policy = q.T.argmax(axis=0)
            model, rewards = bellman.policy_model(mdp, policy)
            del q
            before = old
            for _ in range(sweeps):
                before, old = old, mdp.gamma * (model @ old) + rewards
            iteration += 1
            bounds = change_bounds(mdp, old - before, slack, True)
            yield Sweep(mdp, iteration, "evaluate", old, _largest(old - before), *bounds, policy)


def prioritised_sweeping(
    mdp: MDP, *, value: ArrayLike | None = None, backups: int | None = None, epsilon: float | None = None
) -> Iterator[Sweep]:
    """Back up the state with the largest |TV − V|, update its predecessors' |TV − V|, and repeat.

    Yield a sweep after every `backups` (default S) backups of one state.
    """
    _check_epsilon(epsilon)
    new = bellman.check_value(mdp, value)
    best = _best_of(mdp)
    rows = _state_rows(mdp.transitions, mdp.rewards)
    pattern = sparse.csc_array(mdp.transitions)
    before_ = [
        np.unique(pattern.indices[a:b] % mdp.n_states).tolist() for a, b in zip(pattern.indptr, pattern.indptr[1:], strict=False)
    ]
    gap = np.abs(best(new) - new)
    heap = [(-g, s) for s, g in enumerate(gap.tolist()) if g > 0]
    heapq.heapify(heap)
    iteration = 0
    while True:
        old, left = new.copy(), backups or mdp.n_states
        while heap and left:
            priority, state = heapq.heappop(heap)
            if -priority != gap[state]:
                continue  # an outdated entry: the state was backed up, or its priority raised, since
            left -= 1
            new[state] = _back_up(new, rows[state], mdp.gamma)
            gap[state] = 0.0
            for s in before_[state]:
                gap[s] = abs(_back_up(new, rows[s], mdp.gamma) - new[s])
                if gap[s] > 0:
                    heapq.heappush(heap, (-float(gap[s]), s))
        iteration += 1
        slack = rounding(mdp, new)
        bounds = residual_bounds(mdp, best(new) - new, slack)
        sweep = Sweep(mdp, iteration, "back up", new.copy(), _largest(new - old), *bounds)
        yield sweep
        if not heap or is_finished(sweep, epsilon, slack):
            return


SOLVERS: dict[str, Callable[..., Iterator[Sweep]]] = {
    "value_iteration": value_iteration,
    "policy_iteration": policy_iteration,
    "modified_policy_iteration": modified_policy_iteration,
    "prioritised_sweeping": prioritised_sweeping,
}
"""The solvers that yield sweeps, by name; each takes an MDP and the keywords `value` and `epsilon`."""


def solve(mdp: MDP, *, method: Method | None = None, value: ArrayLike | None = None, epsilon: float | None = None) -> Solution:
    """Return V*, an optimal policy and a bound on the error, at most `epsilon` for γ < 1; None: 1e-8 of the largest value.

    `method` defaults to policy_iteration up to 5,000 states and to value_iteration above. At γ = 1, only policy_iteration is sure
    to find a policy that ends. The methods that sweep return the middle of the interval V + [low, high], which meets the bound
    earlier than V.
    """
    small = mdp.n_states <= EXACT_UP_TO or gamma_is_one(mdp.gamma)
    method = method or ("policy_iteration" if small else "value_iteration")
    if gamma_is_one(mdp.gamma) and method != "policy_iteration":
        raise ValueError(
            f"gamma is 1, where method {method!r} finds the values but may return a policy that never ends; use "
            "policy_iteration, or for the values alone iterate over value_iteration(mdp)."
        )
    iterations = 0
    for sweep in _sweeps(mdp, method, value, epsilon):
        iterations += 1
        if sweep.step == "evaluate":
            continue
        last = sweep
        if method != "policy_iteration" and (sweep.high - sweep.low) / 2 <= wanted_error(epsilon, sweep.value):
            break
    middle = 0.0 if method == "policy_iteration" else (last.low + last.high) / 2
    best = np.where(mdp.is_terminal, 0.0, last.value + middle)
    bound = last.error_bound if method == "policy_iteration" else (last.high - last.low) / 2
    if bound > (wanted := wanted_error(epsilon, best)) and not gamma_is_one(mdp.gamma):
        raise ValueError(f"epsilon is {wanted:g}, but float64 can only prove a bound of {bound:.1e} here; give a larger epsilon.")
    q = bellman.q_values(mdp, best)
    policy = bellman.greedy(q) if last.chosen is None else np.asarray(last.chosen, dtype=np.int64)
    return Solution(best, policy, q, iterations, bound, method)


def _sweeps(mdp: MDP, method: Method, value: ArrayLike | None, epsilon: float | None) -> Iterator[Sweep]:
    if method not in get_args(Method):
        raise ValueError(f"method is {method!r}; expected policy_iteration, value_iteration or modified_policy_iteration.")
    return SOLVERS[method](mdp, value=value, **({} if method == "policy_iteration" else {"epsilon": epsilon}))


def _first_policy(mdp: MDP, policy: ArrayLike | None, value: ArrayLike | None) -> IntArray:
    if policy is not None:
        given = bellman.check_policy(mdp.n_states, mdp.n_actions, policy)
        return np.asarray(given if given.ndim == 1 else given.argmax(axis=1), dtype=np.int64)
    if gamma_is_one(mdp.gamma):
        return safe_policy(mdp.transitions, mdp.rewards, mdp.end_probability, mdp.is_terminal)[0]
    return bellman.greedy(bellman.q_values(mdp, bellman.check_value(mdp, value)))


def _record_evaluation(mdp: MDP, iteration: int, old: FloatArray, new: FloatArray, policy: IntArray) -> Sweep:
    """Return the sweep of an exact evaluation, with the bound from its own residual."""
    model, rewards = bellman.policy_model(mdp, policy)
    steps = _finite_steps(mdp, policy) if gamma_is_one(mdp.gamma) else None
    bounds = residual_bounds(mdp, rewards + mdp.gamma * (model @ new) - new, rounding(mdp, new), steps)
    return Sweep(mdp, iteration, "evaluate", new, _largest(new - old), *bounds, policy)


def _finite_steps(mdp: MDP, policy: IntArray) -> float:
    """Return the largest finite expected number of steps over the states.

    It may be infinite elsewhere: there the policy stays without reward, and the value 0 is exact.
    """
    steps = bellman.expected_steps(mdp, policy)
    return float(steps[np.isfinite(steps)].max(initial=0.0))


def _of_chain(mdp: MDP, model: Matrix, rewards: FloatArray) -> Callable[[FloatArray], FloatArray]:
    """Return the Bellman expectation operator of a Markov chain, V ↦ R_π + γ·P_π·V, for all states at once."""
    return lambda value: np.asarray(rewards + mdp.gamma * (model @ value))


def _best_of(mdp: MDP) -> Callable[[FloatArray], FloatArray]:
    """Return the Bellman optimality operator, V ↦ max_a Q(s, a), for all states at once."""
    return lambda value: np.asarray(bellman.q_values(mdp, value).T.max(axis=0))


def _largest(change: FloatArray) -> float:
    return max(float(change.max()), -float(change.min()))


def _check_epsilon(epsilon: float | None) -> None:
    if epsilon is not None and not epsilon >= 0:
        raise ValueError(f"epsilon is {epsilon}; expected a bound on the error of 0 or more.")


StateRows = tuple[FloatArray, IntArray, FloatArray]


def _state_rows(stacked: Matrix, rewards: FloatArray) -> list[StateRows]:
    """Return for each state (P (A, k) of its k successors, the successors [k], the rewards [A])."""
    n_states, n_actions = rewards.shape
    rows: list[StateRows] = []
    for state in range(n_states):
        block = stacked[np.arange(n_actions) * n_states + state]
        block = block.toarray() if sparse.issparse(block) else block
        successors = np.flatnonzero(block.any(axis=0))
        rows.append((block[:, successors], successors, np.ascontiguousarray(rewards[state])))
    return rows


def _back_up(value: FloatArray, row: StateRows, gamma: float) -> float:
    model, successors, rewards = row
    return float((rewards + gamma * (model @ value[successors])).max())


def _in_place(stacked: Matrix, rewards: FloatArray, gamma: float, order: range | list[int]) -> Callable[[FloatArray], FloatArray]:
    """Return a function V ↦ V' that sweeps state by state in this order and uses each new value at once (Gauss–Seidel)."""
    rows = _state_rows(stacked, rewards)

    def sweep(value: FloatArray) -> FloatArray:
        value = value.copy()
        for state in order:
            value[state] = _back_up(value, rows[state], gamma)
        return value

    return sweep
