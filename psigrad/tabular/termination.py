"""The states from which episodes end, on which it depends if undiscounted sums of rewards are finite.

With γ = 1, the Bellman equation has many solutions. The right one depends on the states that can reach an end, and on those that
can continue for ever without any reward, whose value is exactly 0. Both follow from the graph of the transitions.
Source: Bertsekas and Tsitsiklis 1991, "An analysis of stochastic shortest path problems"; Puterman 1994, chapter 7.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from scipy.sparse import csgraph

BoolArray = NDArray[np.bool_]


def _edges(transitions: Any) -> Any:
    """Return a CSR array (A·S, S) with ones where the stacked transitions have a probability above 0."""
    pattern = sparse.csr_array(transitions)
    return sparse.csr_array(((pattern.data > 0).astype(np.float64), pattern.indices, pattern.indptr), shape=pattern.shape)


def _free_for_ever(edges: Any, rewards: NDArray[np.float64], end: NDArray[np.float64], terminal: BoolArray) -> NDArray[np.bool_]:
    """Return (S, A): True for actions that keep the agent for ever in a set of states without any reward or end.

    This is the greatest such set. It starts with every action that pays nothing, and removes those that may leave the set.
    """
    free = (rewards == 0) & (end == 0) & ~terminal[:, None]
    n_states, n_actions = rewards.shape
    while True:
        outside = ~free.any(axis=1)
        leaves = np.asarray(edges @ outside.astype(np.float64)).reshape(n_actions, n_states).T > 0
        smaller = free & ~leaves
        if (smaller == free).all():
            return np.asarray(free)
        free = smaller


def safe_policy(
    transitions: Any, rewards: NDArray[np.float64], end: NDArray[np.float64], terminal: BoolArray
) -> tuple[NDArray[np.int64], BoolArray]:
    """Return (a policy [S] whose undiscounted value is finite wherever that is possible, the states [S] where it is finite).

    In states where that is possible, the policy stays for ever without reward. In others, each action leads with positive
    probability one step nearer to such a state or to an end.
    """
    edges = _edges(transitions)
    n_states, n_actions = rewards.shape
    free = _free_for_ever(edges, rewards, end, terminal)
    policy = free.argmax(axis=1).astype(np.int64)
    return policy, _spread(edges, end, terminal | free.any(axis=1), policy, np.ones((n_states, n_actions), bool))


def ending_policy(
    transitions: Any, end: NDArray[np.float64], terminal: BoolArray, allowed: BoolArray
) -> tuple[NDArray[np.int64], BoolArray]:
    """Return (a policy [S] of `allowed` (S, A) actions that leads to an end, the states [S] from which it does).

    In these states, each action leads with positive probability one step nearer to an end. In others, it is the first allowed
    one.
    """
    policy = allowed.argmax(axis=1).astype(np.int64)
    return policy, _spread(_edges(transitions), end, terminal.copy(), policy, allowed)


def _spread(edges: Any, end: NDArray[np.float64], done: BoolArray, policy: NDArray[np.int64], allowed: BoolArray) -> BoolArray:
    """Write into `policy` [S] an allowed action that may lead towards a `done` state, for all states that have one.

    Return [S]: the states that are done or have such an action.
    """
    n_states, n_actions = end.shape
    while True:
        nearer = np.asarray(edges @ done.astype(np.float64)).reshape(n_actions, n_states).T > 0
        nearer = (nearer | (end > 0)) & allowed
        new = nearer.any(axis=1) & ~done
        if not new.any():
            return done
        policy[new] = nearer.argmax(axis=1)[new]
        done = done | new


def hopeless_states(transitions: Any, rewards: NDArray[np.float64], end: NDArray[np.float64], terminal: BoolArray) -> BoolArray:
    """Return [S]: True for states from which no policy reaches an end or a place to stay without reward."""
    return ~safe_policy(transitions, rewards, end, terminal)[1]


def can_end(transitions: Any, start: NDArray[np.float64], end: NDArray[np.float64], terminal: BoolArray) -> bool:
    """Return True if some actions lead an episode from `start` [S] to a terminal state or a step with `end` (S, A) above 0."""
    edges = _edges(transitions).tocoo()
    n_states = len(start)
    first = np.flatnonzero(start > 0)
    before = np.concatenate([edges.row % n_states, np.full(first.size, n_states)])  # an added node leads to every first state
    after = np.concatenate([edges.col, first])
    graph = sparse.csr_array((np.ones(before.size), (before, after)), shape=(n_states + 1, n_states + 1))
    reached = csgraph.breadth_first_order(graph, n_states, return_predecessors=False)[1:]
    return bool((terminal | (end > 0).any(axis=1))[reached].any())


def closed_classes(model: Any, end: NDArray[np.float64]) -> list[NDArray[np.intp]]:
    """Return the sets of states that a Markov chain `model` (S, S) never leaves and in which it never ends (`end` [S] is 0)."""
    graph = sparse.csr_array(model)
    n_classes, label = csgraph.connected_components(graph, directed=True, connection="strong")
    rows = np.repeat(np.arange(graph.shape[0]), np.diff(graph.indptr))
    open_ = np.zeros(n_classes, bool)
    open_[label[rows[(label[rows] != label[graph.indices]) & (graph.data > 0)]]] = True
    open_[label[end > 0]] = True
    order = np.argsort(label, kind="stable")
    groups = np.split(order, np.cumsum(np.bincount(label, minlength=n_classes))[:-1])
    return [group for group, is_open in zip(groups, open_, strict=True) if not is_open]
