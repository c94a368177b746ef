"""The MDP behind a Gymnasium environment that carries its model, as FrozenLake, CliffWalking and Taxi do in `unwrapped.P`."""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy import sparse

from psigrad.tabular.mdp import DENSE_UP_TO, MDP


def from_gymnasium(env: Any, gamma: float) -> MDP:
    """The MDP of `env.unwrapped.P`, with the environment's distribution of the first state. Time limits are no part of it."""
    if isinstance(env, str):
        raise ValueError(f"from_gymnasium got the id {env!r}; expected the environment: gymnasium.make({env!r}).")
    try:
        outcomes = env.unwrapped.P
    except AttributeError:
        raise ValueError(
            f"{type(env).__name__} has no model `unwrapped.P`; give a discrete environment that has one, such as FrozenLake-v1, "
            "CliffWalking-v1 or Taxi-v4, or learn from its steps with q_learning or sarsa."
        ) from None
    return from_outcomes(outcomes, gamma, start=getattr(env.unwrapped, "initial_state_distrib", None))


def from_outcomes(outcomes: Any, gamma: float, *, start: Any = None) -> MDP:
    """The MDP of a table outcomes[s][a] = [(probability, next state, reward, terminated), …], Gymnasium's form.

    Equal outcomes add up. Nothing has value after a terminated step: a state that only such steps enter, and where no episode
    starts, becomes terminal; a terminated step into any other state becomes `end` probability.
    """
    n_states = len(outcomes)
    n_actions = len(outcomes[0])
    ragged = [s for s in range(n_states) if len(outcomes[s]) != n_actions]
    if ragged:
        raise ValueError(
            f"State {ragged[0]} has {len(outcomes[ragged[0]])} actions and state 0 has {n_actions}; expected equal numbers."
        )
    for state in range(n_states):
        for action in range(n_actions):
            wrong = [given for given in outcomes[state][action] if not isinstance(given, tuple | list) or len(given) != 4]
            if wrong:
                raise ValueError(
                    f"State {state}, action {action} has the outcome {wrong[0]!r}; expected (probability, next state, reward, "
                    "terminated)."
                )
    rows = [
        (s, a, float(p), int(t), float(r), bool(done))
        for s in range(n_states)
        for a in range(n_actions)
        for p, t, r, done in outcomes[s][a]
        if p > 0
    ]
    s, a, p, t, r, done = (np.array(column) for column in zip(*rows, strict=True))
    terminal = np.zeros(n_states, bool)
    terminal[t[done]] = True
    terminal[t[~done]] = False
    if start is not None:
        terminal[np.asarray(start) > 0] = False
    begins = ~terminal[s]
    s, a, p, t, r, done = (column[begins] for column in (s, a, p, t, r, done))
    ends = done & ~terminal[t]
    on = ~ends
    shape = (n_actions * n_states, n_states)
    matrix = sparse.csr_array((p[on], ((a * n_states + s)[on], t[on])), shape=shape)
    paid = sparse.csr_array(((p * r)[on], ((a * n_states + s)[on], t[on])), shape=shape)
    matrix.sum_duplicates()
    paid.sum_duplicates()
    rewards, end, rewards_end = (np.zeros((n_states, n_actions)) for _ in range(3))
    np.add.at(rewards, (s, a), p * r)
    np.add.at(end, (s[ends], a[ends]), p[ends])
    np.add.at(rewards_end, (s[ends], a[ends]), (p * r)[ends])
    rewards_end /= np.where(end > 0, end, 1.0)
    per_outcome = sparse.csr_array((paid.data / matrix.data, matrix.indices, matrix.indptr), shape=shape)
    dense = n_states <= DENSE_UP_TO
    return MDP(
        matrix.toarray() if dense else matrix,
        rewards,
        gamma,
        terminal=terminal,
        start=start,
        end=end if ends.any() else None,
        rewards_next=per_outcome.toarray() if dense else per_outcome,
        rewards_end=rewards_end if ends.any() else None,
    )
