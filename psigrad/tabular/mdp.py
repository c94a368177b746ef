"""The Markov decision process (S, A, P, R, γ): its transitions and rewards.

`S` states, `A` actions. Row a·S + s of `transitions` is P(·|s, a): the matrices of all actions are stacked, so that one product
with V backs up every state and action. The probability `end` that a step ends the episode is missing from the sum of its row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import sparse

from psigrad.tabular.termination import hopeless_states

FloatArray: TypeAlias = NDArray[np.float64]
IntArray: TypeAlias = NDArray[np.int64]
BoolArray: TypeAlias = NDArray[np.bool_]
Matrix: TypeAlias = Any  # a float64 array or a scipy CSR array
PROBABILITY_SLACK = 1e-9
# The most that rounding to float32 moves a sum of probabilities by. Such rows are divided by their sums.
FLOAT32_SLACK = 1e-5
# The number of states up to which tables are dense, where psigrad chooses between dense and CSR.
DENSE_UP_TO = 512


@dataclass(frozen=True, eq=False)
class MDP:
    """A finite Markov decision process with rewards R(s, a), dense or sparse. The fields below have the shapes after conversion.

    `transitions` may be given as an array (A, S, S), a list of A sparse (S, S) matrices, or already stacked (A·S, S).
    `rewards` may be given as (S, A), as (S,) for the state before the step, or as R(s, a, s') in any form of the transitions.
    Raises ValueError if these are not a decision process. At γ = 1, also raises it if some state can reach neither an end nor a
    place to stay without reward.
    """

    transitions: Matrix
    """(A·S, S), dense or CSR. The rows of terminal states are 0, since no state follows."""
    rewards: FloatArray
    """(S, A): the expected reward of a step, R(s, a) = Σ_s' P(s'|s, a)·R(s, a, s')."""
    gamma: float
    """The discount γ in [0, 1]."""
    terminal: BoolArray | None = None
    """(S,): states where an episode is over; their value is 0. None: no such states."""
    start: FloatArray | None = None
    """(S,): distribution of the first state. None: uniform over the states that are not terminal."""
    end: FloatArray | None = None
    """(S, A): the probability that the episode ends with this step, without a terminal state. None: 0."""
    rewards_next: Matrix | None = None
    """R(s, a, s') with the shape of `transitions`, for simulation. None: every outcome pays R(s, a)."""
    rewards_end: FloatArray | None = None
    """(S, A): the reward of a step that ends the episode through `end`, for simulation. None: R(s, a)."""

    def __post_init__(self) -> None:
        stacked, n_actions = _stack(self.transitions, "transitions")
        n_states = stacked.shape[1]
        rewards, per_outcome = _expect(self.rewards, stacked, n_actions)
        terminal = np.zeros(n_states, bool) if self.terminal is None else np.asarray(self.terminal)
        if terminal.shape != (n_states,) or terminal.dtype != np.bool_:
            raise ValueError(f"terminal has shape {terminal.shape} and type {terminal.dtype}; expected {n_states} booleans.")
        end = _table(self.end, n_states, n_actions, "end")
        if end is not None:
            end = end * ~terminal[:, None]
        stacked, rewards = _without_terminal_rows(stacked, terminal, n_actions), rewards * ~terminal[:, None]
        stacked, end = _normalise(stacked, end, n_states)
        _check(stacked, rewards, self.gamma, terminal, end)
        start = _start(self.start, terminal)
        values = {
            "transitions": stacked,
            "rewards": np.asfortranarray(rewards),
            "gamma": float(self.gamma),
            "terminal": terminal,
            "start": start,
            "end": end,
            "rewards_next": per_outcome if self.rewards_next is None else _as(stacked, self.rewards_next, "rewards_next"),
            "rewards_end": _table(self.rewards_end, n_states, n_actions, "rewards_end"),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)
        if gamma_is_one(self.gamma):
            _check_endings(self)

    def __repr__(self) -> str:
        """Return a text with the sizes only, since the tables would fill pages."""
        kind = "sparse" if self.is_sparse else "dense"
        ends = int(self.is_terminal.sum())
        return f"MDP({self.n_states} states, {ends} of them terminal, {self.n_actions} actions, gamma={self.gamma:g}, {kind})"

    @classmethod
    def from_state_first(cls, transitions_SAS: ArrayLike, rewards: ArrayLike, gamma: float, **options: Any) -> MDP:
        """Return the MDP of transitions (S, A, S), the shape of quantecon's DiscreteDP. `options` are the other fields."""
        return cls(np.swapaxes(np.asarray(transitions_SAS, dtype=np.float64), 0, 1), cast(FloatArray, rewards), gamma, **options)

    @property
    def n_states(self) -> int:
        """The number of states, S."""
        return int(self.transitions.shape[1])

    @property
    def n_actions(self) -> int:
        """The number of actions, A."""
        return int(self.transitions.shape[0]) // self.n_states

    @property
    def is_sparse(self) -> bool:
        """True if the transitions are a CSR array."""
        return bool(sparse.issparse(self.transitions))

    @property
    def is_terminal(self) -> BoolArray:
        """(S,): `terminal`; if that is None, all False."""
        return cast(BoolArray, self.terminal)

    @property
    def start_distribution(self) -> FloatArray:
        """(S,): `start`; if that is None, uniform over the states that are not terminal."""
        return cast(FloatArray, self.start)

    @property
    def end_probability(self) -> FloatArray:
        """(S, A): `end`; if that is None, zeros."""
        return np.zeros((self.n_states, self.n_actions)) if self.end is None else self.end


def gamma_is_one(gamma: float) -> bool:
    """Return True if γ is 1. Returns are then undiscounted sums, which are finite only if episodes end."""
    return gamma == 1.0


def discounted_return(rewards_T: ArrayLike, gamma: float) -> float:
    """Return the return of an episode, G = Σ_t γ^t·r_t, from its rewards [T]."""
    return discounted(np.asarray(rewards_T, dtype=np.float64).tolist(), gamma)


def discounted(rewards: Sequence[float], gamma: float, last: float = 0.0) -> float:
    """Return Σ_{t<T} γ^t·r_t + γ^T·last for T rewards."""
    for reward in reversed(rewards):
        last = reward + gamma * last
    return last


def _stack(given: Any, name: str) -> tuple[Matrix, int]:
    """Return (the stacked array (A·S, S), A) for transitions or rewards in any accepted form."""
    if sparse.issparse(given):
        stacked = sparse.csr_array(given, dtype=np.float64)
    elif isinstance(given, Sequence) and given and all(sparse.issparse(p) for p in given):
        if len({p.shape for p in given}) != 1 or given[0].shape[0] != given[0].shape[1]:
            raise ValueError(
                f"{name} is a list of sparse matrices of shapes {[p.shape for p in given]}; expected (S, S) for each."
            )
        stacked = sparse.csr_array(sparse.vstack(given, format="csr"), dtype=np.float64)
    else:
        stacked = np.asarray(given, dtype=np.float64)
        if stacked.ndim == 3 and stacked.shape[1] == stacked.shape[2]:
            stacked = stacked.reshape(-1, stacked.shape[2])
        elif stacked.ndim == 3 and stacked.shape[0] == stacked.shape[2]:
            raise ValueError(f"{name} has shape (S, A, S) = {stacked.shape}; expected (A, S, S); use MDP.from_state_first.")
    if stacked.ndim != 2 or stacked.shape[1] == 0 or stacked.shape[0] == 0 or stacked.shape[0] % stacked.shape[1]:
        raise ValueError(
            f"{name} has shape {stacked.shape}; expected an array (A, S, S), a list of A sparse matrices (S, S), or one matrix "
            "(A·S, S)."
        )
    return stacked, stacked.shape[0] // stacked.shape[1]


def _as(stacked: Matrix, given: Any, name: str) -> Matrix:
    """Return R(s, a, s') in any accepted form as (A·S, S), dense or CSR as the transitions are."""
    found, _ = _stack(given, name)
    if found.shape != stacked.shape:
        raise ValueError(
            f"As (A·S, S), {name} R(s, a, s') has shape {found.shape}; expected {stacked.shape}, as transitions has."
        )
    if sparse.issparse(stacked):
        return sparse.csr_array(found)
    return found.toarray() if sparse.issparse(found) else found


def _expect(given: Any, stacked: Matrix, n_actions: int) -> tuple[FloatArray, Matrix | None]:
    """Return (R(s, a) with shape (S, A), R(s, a, s') or None) for rewards in any accepted form."""
    n_states = stacked.shape[1]
    is_sparse = sparse.issparse(given) or (isinstance(given, Sequence) and len(given) > 0 and sparse.issparse(given[0]))
    table = None if is_sparse else np.asarray(given, dtype=np.float64)
    if table is not None and table.shape == (n_states,):
        return np.repeat(table[:, None], n_actions, axis=1), None
    if table is not None and table.shape == (n_states, n_actions):
        return table, None
    if table is not None and table.ndim != 3 and table.shape != stacked.shape:
        raise ValueError(
            f"rewards has shape {table.shape}; expected ({n_states}, {n_actions}) for R(s, a), ({n_states},) for R(s), "
            "or the form of the transitions for R(s, a, s')."
        )
    per_outcome = _as(stacked, given, "rewards")
    sums = (per_outcome * stacked).sum(axis=1)
    return np.asarray(sums, dtype=np.float64).reshape(n_actions, n_states).T, per_outcome


def _table(given: Any, n_states: int, n_actions: int, name: str) -> FloatArray | None:
    if given is None:
        return None
    table = np.asarray(given, dtype=np.float64)
    if table.shape != (n_states, n_actions) or not np.isfinite(table).all():
        raise ValueError(f"{name} has shape {table.shape}; expected finite numbers of shape ({n_states}, {n_actions}).")
    return table


def _start(given: Any, terminal: BoolArray) -> FloatArray:
    """Return the distribution of the first state as an array. Raises ValueError for an invalid one."""
    if given is None:
        alive = ~terminal if not terminal.all() else np.ones_like(terminal)
        return np.asarray(alive / alive.sum())
    start = np.asarray(given, dtype=np.float64)
    if start.shape == terminal.shape and PROBABILITY_SLACK < abs(start.sum() - 1) <= FLOAT32_SLACK:
        start = start / start.sum()
    if (
        start.shape != terminal.shape
        or not np.isfinite(start).all()
        or (start < 0).any()
        or abs(start.sum() - 1) > PROBABILITY_SLACK
    ):
        raise ValueError(
            f"start has shape {start.shape} and sum {start.sum():g}; expected {terminal.size} probabilities that sum to 1."
        )
    return start


def _without_terminal_rows(stacked: Matrix, terminal: BoolArray, n_actions: int) -> Matrix:
    """Return the transitions with the rows of terminal states set to 0."""
    rows = np.flatnonzero(np.tile(terminal, n_actions))
    if not rows.size:
        return stacked
    if not sparse.issparse(stacked):
        if not stacked[rows].any():
            return stacked
        stacked = stacked.copy()
        stacked[rows] = 0.0
        return stacked
    lengths = np.diff(stacked.indptr)
    if not lengths[rows].any():
        return stacked
    keep = np.ones(stacked.shape[0], bool)
    keep[rows] = False
    chosen = np.repeat(keep, lengths)
    indptr = np.concatenate([[0], np.cumsum(np.where(keep, lengths, 0))]).astype(stacked.indptr.dtype)
    return sparse.csr_array((stacked.data[chosen], stacked.indices[chosen], indptr), shape=stacked.shape)


def _normalise(stacked: Matrix, end: FloatArray | None, n_states: int) -> tuple[Matrix, FloatArray | None]:
    """Return transitions and ends whose rows sum to 1 where they did so in float32."""
    total = np.asarray(stacked.sum(axis=1), dtype=np.float64).reshape(-1, n_states).T + (0.0 if end is None else end)
    off = np.abs(total - 1)
    if not (rounded := (off > PROBABILITY_SLACK) & (off <= FLOAT32_SLACK)).any():
        return stacked, end
    scale = np.divide(1.0, total, out=np.ones_like(total), where=rounded)
    rows = scale.T.reshape(-1, 1)
    stacked = stacked.multiply(rows).tocsr() if sparse.issparse(stacked) else stacked * rows
    return stacked, None if end is None else end * scale


def _check(stacked: Matrix, rewards: FloatArray, gamma: float, terminal: BoolArray, end: FloatArray | None) -> None:
    """Raise ValueError, naming the wrong entry, if probabilities, rewards or the discount are invalid."""
    if not 0.0 <= gamma <= 1.0:
        raise ValueError(f"gamma is {gamma}; expected a discount in [0, 1].")
    entries = stacked.data if sparse.issparse(stacked) else stacked
    if not np.isfinite(entries).all() or (entries.size and entries.min() < 0):
        raise ValueError("`transitions` has a negative or non-finite number; expected probabilities.")
    if end is not None and (end < 0).any():
        raise ValueError("`end` has a negative number; expected probabilities.")
    if not np.isfinite(rewards).all():
        state, action = np.argwhere(~np.isfinite(rewards))[0]
        raise ValueError(
            f"rewards[{state}, {action}] is {rewards[state, action]}; expected a finite number; to forbid an "
            "action, make its reward large and negative."
        )
    n_states = terminal.size
    sums = np.asarray(stacked.sum(axis=1), dtype=np.float64).reshape(-1, n_states).T
    total = sums if end is None else sums + end
    wrong = (np.abs(total - 1) > PROBABILITY_SLACK) & ~terminal[:, None]
    if wrong.any():
        state, action = np.argwhere(wrong)[0]
        raise ValueError(
            f"The probabilities of state {state}, action {action} sum to {total[state, action]:.10g}; expected 1; "
            "mark the states where an episode is over as `terminal`."
        )


def _check_endings(mdp: MDP) -> None:
    """Raise ValueError if γ = 1 and some state can reach neither an end nor a place to stay without reward."""
    hopeless = hopeless_states(mdp.transitions, mdp.rewards, mdp.end_probability, mdp.is_terminal)
    if hopeless.any():
        state = int(np.flatnonzero(hopeless)[0])
        raise ValueError(
            f"gamma is 1 and from state {state} no terminal state can be reached, so its return is an endless sum; "
            "mark terminal states, or use gamma below 1."
        )


def from_gymnasium(env: Any, gamma: float) -> MDP:
    """Return the MDP of `env.unwrapped.P`, with the environment's distribution of the first state and without time limits."""
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
    """Return the MDP of a table outcomes[s][a] = [(probability, next state, reward, terminated), …], Gymnasium's format.

    The probabilities of equal outcomes are added. No value follows a terminated step. A state becomes terminal if only terminated
    steps enter it and no episode starts there. A terminated step into any other state adds to the probability `end`.
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
