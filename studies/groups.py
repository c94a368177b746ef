"""The exact expected gradient of methods that compare completions of one prompt, by enumeration of every possible group.

The prompt is a fork. The first token determines whether the answer will be correct. Every later one decides whether the
completion continues or ends. The reward does not depend on length, so ∇J is 0 for every decision but the first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import combinations_with_replacement

import numpy as np

from psigrad.objective import PolicyGradient
from psigrad.objective.catalog import DR_GRPO, GRPO
from psigrad.objective.parts.advantage import group_mean
from psigrad.objective.parts.aggregate import fixed_length, sequence_mean
from psigrad.tabular import MDP, all_paths, softmax_policy
from psigrad.tabular.mdp import FloatArray
from studies import problems

WITHOUT_KL = replace(GRPO, kl=None)
METHODS = {
    "GRPO": WITHOUT_KL,
    "GRPO without std": replace(WITHOUT_KL, psi=group_mean(std=False)),
    "Dr. GRPO": DR_GRPO,
}
assert METHODS["GRPO"].aggregate is sequence_mean and isinstance(DR_GRPO.aggregate, fixed_length)


def fork(longest: int) -> MDP:
    """Return a process whose state 0 chooses between the correct and the wrong branch.

    Each branch has `longest` − 1 states in a row, in which action 0 continues and action 1 ends. The last state always ends. The
    correct branch gives the reward 1 at its end.
    """
    places, n_states = longest - 1, 2 * longest
    transitions, rewards = np.zeros((2, n_states, n_states)), np.zeros((2, n_states, n_states))
    over = n_states - 1
    for branch, pays in enumerate((1.0, 0.0)):
        first = 1 + branch * places
        transitions[branch, 0, first if places else over] = 1.0
        rewards[branch, 0, over] = pays * (not places)
        for i in range(places):
            for action in (0, 1):
                following = first + i + 1 if action == 0 and i < places - 1 else over
                transitions[action, first + i, following] = 1.0
                rewards[action, first + i, over] = pays
    return MDP(transitions, rewards, 1.0, terminal=np.arange(n_states) == over, start=np.eye(n_states)[0])


def logits(longest: int, success: float) -> FloatArray:
    """Return (S, A): logits of a policy that is correct with this probability, and continues with probability ½ everywhere."""
    theta = np.zeros((2 * longest, 2))
    theta[0, 0] = math.log(success / (1 - success))
    return theta


@dataclass(frozen=True, eq=False)
class Expected:
    """The expected step of a method on one prompt."""

    gradient: FloatArray
    """[S·A]"""
    weight: dict[tuple[bool, int], float]
    """The weight of ∇log π of one token, by (right, length of its completion)."""


def enumerate_groups(method: PolicyGradient, longest: int, theta: FloatArray, group: int) -> Expected:
    """Return the mean gradient over all groups of `group` completions, by the method's own `prepare` and `loss`."""
    mdp, policy = fork(longest), softmax_policy(theta, 1.0)
    paths, p = all_paths(mdp, policy)
    members = np.array(list(combinations_with_replacement(range(len(p)), group)))
    chance = np.array([_orders(row) for row in members]) * p[members].prod(1)
    drawn = paths.select(members.ravel())
    batch = problems.batch_of(drawn, policy, group=np.repeat(np.arange(len(members)), group))
    prepared = method.prepare(batch, method.initial_state(), metrics=False)
    weight_NT = problems.step_weights(method, prepared, group)
    chance_N = np.repeat(chance, group)
    gradient = problems.gradients(weight_NT * chance_N[:, None], drawn, policy, len(chance_N))[0]
    right_N, weights = drawn.rewards.sum(1) > 0, {}
    for right, length in {(bool(r), int(n)) for r, n in zip(right_N, drawn.lengths, strict=True)}:
        these = (right_N == right) & (drawn.lengths == length)
        weights[right, length] = float(chance_N[these] @ weight_NT[these, 0] / chance_N[these].sum())
    return Expected(gradient, dict(sorted(weights.items())))


def _orders(row: np.ndarray) -> float:
    """Return the number of orders in which this group can be drawn."""
    _, counts = np.unique(row, return_counts=True)
    return math.factorial(len(row)) / math.prod(math.factorial(c) for c in counts)


def accuracy(longest: int, theta: FloatArray) -> tuple[float, FloatArray]:
    """Return J, the probability of a correct answer, and ∇J [S·A], by visits and advantages."""
    mdp, policy = fork(longest), softmax_policy(theta, 1.0)
    return float(policy[0, 0]), problems.exact_gradient(mdp, policy).ravel()


def mean_length(longest: int, theta: FloatArray, *, right: bool) -> tuple[float, FloatArray]:
    """Return the mean length of correct or of wrong completions, and its gradient [S·A], exact."""
    mdp, policy = fork(longest), softmax_policy(theta, 1.0)
    paths, p = all_paths(mdp, policy)
    these = (paths.rewards.sum(1) > 0) == right
    share = np.where(these, p, 0.0) / p[these].sum()
    mean = float(share @ paths.lengths)
    weight = (share * (paths.lengths - mean))[:, None] * paths.mask
    return mean, problems.gradients(weight, paths, policy, len(p))[0]
