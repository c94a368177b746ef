"""Small decision processes with a known policy gradient, and the conversion of their episodes to the objective's `Batch`.

The policy is a softmax table, π(a|s) ∝ exp θ[s, a], so that ∂ log π(a|s) / ∂θ[s, b] = 1[a = b] − π(b|s). A gradient over θ is a
weighted count of states and actions, and a hundred thousand of them need no loop over autograd.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from psigrad.objective import Batch, PolicyGradient, PolicyOutputs, Prepared
from psigrad.tabular import MDP, Paths, advantages, evaluate, occupancy, q_values, softmax_policy
from psigrad.tabular.mdp import FloatArray, IntArray

EXACT, ROUGH = "exact", "rough"


@dataclass(frozen=True, eq=False)
class TabularCritic:
    """A critic's values."""

    value: FloatArray
    """[S]: V(s); never read at terminal states."""
    action_value: FloatArray
    """(S, A): Q(s, a)."""


def line_walk(*, cells: int = 5, steps: int = 6, slip: float = 0.2, gamma: float = 1.0, at_the_end: bool = False) -> MDP:
    """Return a line of cells 0 … n − 1, two actions (left, right), a fixed number of steps; each step pays its new cell's number.

    With probability `slip`, a step goes in the opposite direction. A step beyond the border has no effect. The walk starts in the
    middle. State t·n + x is cell x after t steps, so every episode can be enumerated. With `at_the_end`, only the last step pays,
    as for completions.
    """
    n_states = (steps + 1) * cells
    transitions, rewards = np.zeros((2, n_states, n_states)), np.zeros((2, n_states, n_states))
    for t in range(steps):
        for x in range(cells):
            for action, aim in enumerate((-1, 1)):
                for move, p in ((aim, 1 - slip), (-aim, slip)):
                    new = min(max(x + move, 0), cells - 1)
                    transitions[action, t * cells + x, (t + 1) * cells + new] += p
                    pays = t == steps - 1 or not at_the_end
                    rewards[action, t * cells + x, (t + 1) * cells + new] = float(new) if pays else 0.0
    terminal = np.arange(n_states) >= steps * cells
    return MDP(transitions, rewards, gamma, terminal=terminal, start=np.eye(n_states)[cells // 2])


def exact_gradient(mdp: MDP, policy: FloatArray) -> FloatArray:
    """Return (S, A): ∂J/∂θ[s, a] = d(s)·π(a|s)·A(s, a), by the policy gradient theorem and two linear solves.

    J is the expected discounted return from the start, d the discounted visits.
    """
    return occupancy(mdp, policy)[:, None] * policy * advantages(mdp, policy)


@dataclass(frozen=True, eq=False)
class Problem:
    """A process, a softmax policy and its critics, with all exact reference values."""

    mdp: MDP
    policy: FloatArray
    critics: dict[str, TabularCritic | None]

    @property
    def gradient(self) -> FloatArray:
        """[S·A]: the exact gradient over θ."""
        return exact_gradient(self.mdp, self.policy).ravel()


def problem(mdp: MDP, *, critic_error: float = 1.0, theta_spread: float = 0.5) -> Problem:
    """Return a process with a policy and critics. The draws are fixed.

    θ is normal with deviation `theta_spread`. The rough critic is V plus normal noise of deviation `critic_error`. Its Q follows
    from one step and that V: Q̂(s, a) = E[r + γ·V̂(s')].
    """
    rng = np.random.default_rng(0)
    policy = softmax_policy(theta_spread * rng.normal(size=(mdp.n_states, mdp.n_actions)), 1.0)
    value = evaluate(mdp, policy)
    rough = np.where(mdp.is_terminal, 0.0, value + critic_error * rng.normal(size=mdp.n_states))
    critics = {"": None, EXACT: TabularCritic(value, q_values(mdp, value)), ROUGH: TabularCritic(rough, q_values(mdp, rough))}
    return Problem(mdp, policy, critics)


def batch_of(paths: Paths, policy: FloatArray, critic: TabularCritic | None = None, group: IntArray | None = None) -> Batch:
    """Return episodes as the batch that an algorithm reads. `inputs` contains their states and actions, for custom parts."""
    states, mask = paths.states[:, :-1], torch.from_numpy(paths.mask)
    values: dict[str, Any] = {}
    if critic is not None:
        last = np.where(paths.terminated, 0.0, critic.value[paths.states[:, -1]])
        values = {
            "value": torch.from_numpy(critic.value[states]),
            "action_value": torch.from_numpy(critic.action_value[states, paths.actions]),
            "last_value": torch.from_numpy(last),
        }
    with np.errstate(divide="ignore"):
        logp = torch.from_numpy(np.log(policy[states, paths.actions]))
    return Batch(
        mask=mask,
        reward=torch.from_numpy(paths.rewards),
        logp_old=logp,
        group=torch.zeros(len(states), dtype=torch.long) if group is None else torch.from_numpy(group),
        inputs={"states": torch.from_numpy(states), "actions": torch.from_numpy(paths.actions)},
        truncated=torch.from_numpy(~paths.terminated),
        **values,
    )


def step_weights(method: PolicyGradient, prepared: Prepared, sequences: int) -> FloatArray:
    """Return [N, T]: −∂loss/∂ log π(a_t|s_t), by autograd through the method's own loss; `sequences` rows make one estimate.

    The method's aggregate is `sequence_sum`, in which each row counts 1/`sequences`. The loss of the full batch is then the sum
    of the losses of N / `sequences` optimiser steps.
    """
    logp = prepared.batch.logp_old.clone().requires_grad_()
    totals = replace(method.totals(prepared), sequences=sequences)
    loss = method.loss(prepared, PolicyOutputs(logp, value=prepared.batch.value), totals, method.initial_state())
    (gradient,) = torch.autograd.grad(loss.value, logp)
    return np.asarray(-gradient.numpy())


def gradients(weight_NT: FloatArray, paths: Paths, policy: FloatArray, rows: int) -> FloatArray:
    """Return [N / rows, S·A]: Σ over `rows` episodes and their steps of weight · ∂ log π(a_t|s_t) / ∂θ."""
    n_states, n_actions = policy.shape
    n_estimates = len(weight_NT) // rows
    taken, size = paths.mask, n_states * n_actions
    estimate = np.broadcast_to(np.arange(len(weight_NT))[:, None] // rows, taken.shape)[taken]
    index = (estimate * n_states + paths.states[:, :-1][taken]) * n_actions + paths.actions[taken]
    count = np.bincount(index, weight_NT[taken], minlength=n_estimates * size).reshape(n_estimates, n_states, n_actions)
    return np.asarray((count - policy * count.sum(axis=2, keepdims=True)).reshape(n_estimates, size))
