"""Policies and the Bellman equations: V, Q and advantages. The values of a policy are exact solutions of a linear system."""

from __future__ import annotations

from functools import partial

import numpy as np
from numpy.typing import ArrayLike
from scipy import sparse
from scipy.sparse import linalg

from psigrad.tabular.mdp import MDP, BoolArray, FloatArray, IntArray, Matrix, gamma_is_one
from psigrad.tabular.termination import closed_classes

TIE = 1e-12
Policy = IntArray | FloatArray


def uniform_policy(mdp: MDP) -> FloatArray:
    """Return (S, A): every action with the same probability."""
    return np.full((mdp.n_states, mdp.n_actions), 1.0 / mdp.n_actions)


def greedy(q: FloatArray, current: IntArray | None = None) -> IntArray:
    """Return [S]: argmax_a Q(s, a) for q (S, A).

    Actions within 1e-12·(1 + |best|) of the best count as equal. If the action in `current` [S] is one of these, it
    is kept; otherwise the one with the lowest index is chosen. So rounding never changes the policy.
    """
    q_AS = q.T
    best = q_AS.max(axis=0)
    floor = best - TIE * (1 + np.abs(best))
    chosen = (q_AS >= floor).argmax(axis=0).astype(np.int64)
    if current is not None:
        keep = q_AS[current, np.arange(best.size)] >= floor
        chosen[keep] = current[keep]
    return np.asarray(chosen)


def epsilon_greedy(q: FloatArray, epsilon: float) -> FloatArray:
    """Return (S, A): the greedy action with probability 1 − ε + ε/A (shared among ties), every other with ε/A."""
    _check_epsilon(epsilon)
    best = q.max(axis=1, keepdims=True)
    ties = q >= best - TIE * (1 + np.abs(best))
    return np.asarray((1 - epsilon) * ties / ties.sum(axis=1, keepdims=True) + epsilon / q.shape[1])


def softmax_policy(q: FloatArray, temperature: float) -> FloatArray:
    """Return (S, A): π(a|s) ∝ exp(Q(s, a)/τ), the policy that maximises E[Q] + τ·entropy."""
    if temperature <= 0:
        raise ValueError(f"temperature is {temperature}; expected above 0; use greedy for the limit 0.")
    weights = np.exp((q - q.max(axis=1, keepdims=True)) / temperature)
    return np.asarray(weights / weights.sum(axis=1, keepdims=True))


def _check_epsilon(epsilon: float) -> None:
    if not 0 <= epsilon <= 1:
        raise ValueError(f"epsilon is {epsilon}; expected a probability in [0, 1].")


def check_policy(n_states: int, n_actions: int, policy: ArrayLike) -> Policy:
    """Return a policy as an array of [S] actions or (S, A) probabilities. Raises ValueError if it is neither."""
    given = np.asarray(policy)
    if given.shape == (n_states,) and np.issubdtype(given.dtype, np.integer):
        outside = given[(given < 0) | (given >= n_actions)]
        if outside.size:
            raise ValueError(f"policy names action {outside[0]}; expected 0 to {n_actions - 1}.")
        return given.astype(np.int64)
    if given.shape == (n_states, n_actions):
        table = given.astype(np.float64)
        if not np.isfinite(table).all() or (table < 0).any() or (np.abs(table.sum(axis=1) - 1) > 1e-9).any():
            raise ValueError(
                "policy holds rows that are not probabilities; expected numbers of at least 0 that sum to 1 in every state."
            )
        return table
    raise ValueError(
        f"policy has shape {given.shape} and type {given.dtype}; expected {n_states} action numbers, or probabilities of "
        f"shape ({n_states}, {n_actions})."
    )


def check_value(mdp: MDP, value: ArrayLike | None) -> FloatArray:
    """Return a float copy of V [S] with 0 at terminal states; zeros for None."""
    if value is None:
        return np.zeros(mdp.n_states)
    given = np.array(value, dtype=np.float64)
    if given.shape != (mdp.n_states,) or not np.isfinite(given).all():
        raise ValueError(f"value has shape {given.shape}; expected {mdp.n_states} finite numbers, one for each state.")
    given[mdp.is_terminal] = 0.0
    return given


def policy_model(mdp: MDP, policy: ArrayLike) -> tuple[Matrix, FloatArray]:
    """Return the Markov chain of a policy: P_π (S, S) and R_π [S], with P_π = Σ_a π(a|s)·P(·|s, a)."""
    policy = check_policy(mdp.n_states, mdp.n_actions, policy)
    states = np.arange(mdp.n_states)
    if policy.ndim == 1:
        return mdp.transitions[policy * mdp.n_states + states], mdp.rewards[states, policy]
    rewards = np.einsum("sa,sa->s", policy, mdp.rewards)
    if not mdp.is_sparse:
        return np.einsum("sa,ast->st", policy, mdp.transitions.reshape(mdp.n_actions, mdp.n_states, -1)), rewards
    weighted = sparse.csr_array(sparse.diags_array(policy.T.ravel()) @ mdp.transitions)
    folded = sparse.csr_array((np.ones(policy.size), (np.tile(states, mdp.n_actions), np.arange(policy.size))))
    return sparse.csr_array(folded @ weighted), rewards


def _of_policy(table: FloatArray, policy: Policy) -> FloatArray:
    """Return [S]: the mean of a table (S, A) under a policy, Σ_a π(a|s)·table(s, a)."""
    if policy.ndim == 1:
        return np.asarray(table[np.arange(table.shape[0]), policy])
    return np.asarray((table * policy).sum(axis=1))


def q_values(mdp: MDP, value: FloatArray) -> FloatArray:
    """Return (S, A): Q(s, a) = R(s, a) + γ·Σ_s' P(s'|s, a)·V(s'), in one product for all states and actions."""
    q = mdp.transitions @ value
    q *= mdp.gamma
    q_AS = q.reshape(mdp.n_actions, mdp.n_states)
    q_AS += mdp.rewards.T
    return np.asarray(q_AS.T)


def advantages(mdp: MDP, policy: ArrayLike, value: FloatArray | None = None) -> FloatArray:
    """Return (S, A): A(s, a) = Q(s, a) − V(s) of a policy, whose mean under the policy is 0. `value` is V_π if already known."""
    value = evaluate(mdp, policy) if value is None else value
    return q_values(mdp, value) - value[:, None]


def bellman_residual(mdp: MDP, value: FloatArray, policy: ArrayLike | None = None) -> float:
    """Return max_s |(TV)(s) − V(s)|, with T the optimality operator, or the operator of a policy."""
    q = q_values(mdp, value)
    backed_up = q.max(axis=1) if policy is None else _of_policy(q, check_policy(mdp.n_states, mdp.n_actions, policy))
    return float(np.abs(backed_up - value).max())


def _solve(mdp: MDP, policy: Policy, right: FloatArray) -> FloatArray:
    """Return x [S] with (I − γ·P_π)·x = right. At γ = 1, x is 0 in the sets of states that the policy never leaves.

    Raises ValueError if `right` is not 0 there, since x is then not finite.
    """
    model, _ = policy_model(mdp, policy)
    keep = ~mdp.is_terminal
    if gamma_is_one(mdp.gamma):
        ends = _of_policy(mdp.end_probability, policy) + mdp.is_terminal
        for states in closed_classes(model, ends):
            if np.abs(right[states]).max() > 0:
                raise ValueError(
                    f"gamma is 1 and under this policy state {states[0]} never ends but is rewarded for ever, so its value "
                    "is not finite; give a policy that ends, or use gamma below 1."
                )
            keep[states] = False
    return _solve_discounted(model, np.flatnonzero(keep), mdp.gamma, right)


def _solve_discounted(
    model: Matrix, system: IntArray, gamma: float, right: FloatArray, *, transposed: bool = False
) -> FloatArray:
    """Return x [S] with (I − γ·P)·x = right on the states in `system`, and 0 elsewhere. `transposed` replaces P by Pᵀ."""
    out = np.zeros(right.size)
    if not system.size:
        return out
    part = model[system][:, system]
    eye = sparse.eye_array(system.size) if sparse.issparse(model) else np.eye(system.size)
    matrix = (eye - gamma * part).T if transposed else eye - gamma * part
    solved = linalg.splu(matrix.tocsc()).solve if sparse.issparse(model) else partial(np.linalg.solve, matrix)
    out[system] = solved(right[system])
    return out


def _reaching(matrix: Matrix, states: BoolArray) -> BoolArray:
    """Return [S]: `states` and every state from which a path of nonzero entries of `matrix` (S, S) leads to one of them."""
    while True:
        wider = states | (np.asarray(matrix @ states.astype(np.float64)) > 0)
        if (wider == states).all():
            return states
        states = wider


def evaluate(mdp: MDP, policy: ArrayLike) -> FloatArray:
    """Return [S]: V_π, the exact solution of (I − γ·P_π)·V = R_π, dense or sparse.

    At γ = 1, a set of states that the policy never leaves has value 0 if no step in it pays a reward. Otherwise ValueError is
    raised.
    """
    policy = check_policy(mdp.n_states, mdp.n_actions, policy)
    return _solve(mdp, policy, _of_policy(mdp.rewards, policy))


def expected_steps(mdp: MDP, policy: ArrayLike) -> FloatArray:
    """Return [S]: the discounted number of remaining steps, Σ_t γ^t·P(the episode is not over at t).

    At γ = 1, it is infinite if the episode may never end.
    """
    policy = check_policy(mdp.n_states, mdp.n_actions, policy)
    alive = (~mdp.is_terminal).astype(np.float64)
    if not gamma_is_one(mdp.gamma):
        return _solve(mdp, policy, alive)
    model, _ = policy_model(mdp, policy)
    ends = _of_policy(mdp.end_probability, policy) + mdp.is_terminal
    stuck = np.zeros(mdp.n_states)
    for states in closed_classes(model, ends):
        stuck[states] = 1.0
    steps = _solve(mdp, policy, np.where(stuck > 0, 0.0, alive))
    return np.where(_reaching(model, stuck > 0), np.inf, steps)


def occupancy(mdp: MDP, policy: ArrayLike) -> FloatArray:
    """Return [S]: d(s) = Σ_t γ^t·P(s_t = s | start, π), the discounted visits; d·R_π is the expected return from the start."""
    policy = check_policy(mdp.n_states, mdp.n_actions, policy)
    start = np.where(mdp.is_terminal, 0.0, mdp.start_distribution)
    if gamma_is_one(mdp.gamma) and not np.isfinite(expected_steps(mdp, policy)[start > 0]).all():
        raise ValueError("gamma is 1 and this policy may never end, so its visits are not finite; use gamma below 1.")
    # d = start + γ·P_πᵀ·d over the states that the start can reach
    model, _ = policy_model(mdp, policy)
    reached = _reaching(model.T, start > 0) & ~mdp.is_terminal
    return _solve_discounted(model, np.flatnonzero(reached), mdp.gamma, start, transposed=True)
