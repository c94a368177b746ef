"""Exact expected gradients: a tabular softmax policy whose every group of trajectories is enumerated.

The oracle never calls psigrad. For unbiased methods it is the gradient of the expected reward J, by autograd through the
enumeration of all trajectories. For methods with a stated bias (group std, clipping, k3 in the loss) it is the method's own
formula: a coefficient c[i][t] for each step, written out with Python floats, times the score onehot(a) − π(·|s) of a softmax.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from psigrad.config.algorithms import resolve
from psigrad.objective import Batch, PolicyGradient, PolicyOutputs
from psigrad.objective.batch import terminal
from psigrad.objective.catalog import METHODS as PRESETS
from psigrad.objective.parts import aggregate
from psigrad.objective.parts.advantage import best_of_group, gae, group_mean, k_step, length_gae, ones, reward_to_go, whitened
from psigrad.objective.parts.aggregate import clip_covariance, sequence_sum
from psigrad.objective.parts.critic import bonus, value_loss
from psigrad.objective.parts.group_advantage import pass_at_k
from psigrad.objective.parts.ratio import KL, none
from psigrad.objective.parts.surrogate import clip, score, with_imitation

EOS = 0
TOLERANCE = 1e-10
# two reward functions: one of the first step, one of all others
PART_WEIGHTS = (1.0, 2.0)


def parts_of(rewards: list[float]) -> list[float]:
    return [rewards[0], sum(rewards[1:])]


@dataclass
class World:
    """V tokens, at most T of them, EOS ends early. theta[s] are the logits of state (prefix) s.

    Of the groups that differ in the order of their members alone one is computed, in an order drawn at random, for all.
    """

    n_tokens: int
    horizon: int
    group_size: int
    off_policy: bool

    def __post_init__(self) -> None:
        rng = np.random.default_rng(7 * self.horizon + self.group_size)
        actions = range(1, self.n_tokens)
        self.prefixes = [p for n in range(self.horizon) for p in itertools.product(actions, repeat=n)]
        self.row_of = {p: i for i, p in enumerate(self.prefixes)}
        self.trajectories = [(*p, EOS) for p in self.prefixes] + list(itertools.product(actions, repeat=self.horizon))
        shape = (len(self.prefixes), self.n_tokens)
        self.theta = rng.normal(size=shape)
        self.theta_old = self.theta + (1.2 * rng.normal(size=shape) if self.off_policy else 0.0)
        self.theta_ref = self.theta + 0.7 * rng.normal(size=shape)
        self.values = rng.normal(size=len(self.prefixes))
        # A reward depends on what was done so far and never on what comes after: reward-to-go is right only then.
        reward_of = {y[: t + 1]: float(rng.integers(0, 2)) for y in self.trajectories for t in range(len(y))}
        self.step_rewards = [[reward_of[y[: t + 1]] for t in range(len(y))] for y in self.trajectories]
        self.groups = [(tuple(rng.permutation(members).tolist()), orders) for members, orders in self.multisets()]

    def multisets(self) -> Iterator[tuple[tuple[int, ...], int]]:
        """Each choice of trajectories for a group, and in how many orders they can stand: together all groups there are."""
        for members in itertools.combinations_with_replacement(range(len(self.trajectories)), self.group_size):
            repeated = math.prod(math.factorial(members.count(i)) for i in set(members))
            yield members, math.factorial(self.group_size) // repeated

    def states(self, y: tuple[int, ...]) -> list[int]:
        return [self.row_of[y[:t]] for t in range(len(y))]

    def log_probs(self, theta: np.ndarray, y: tuple[int, ...]) -> list[float]:
        return [float(theta[s, a] - np.log(np.exp(theta[s]).sum())) for s, a in zip(self.states(y), y, strict=True)]

    def truncated(self, y: tuple[int, ...]) -> bool:
        return y[-1] != EOS


def worlds() -> list[World]:
    return [World(3, 2, 3, off_policy=True), World(3, 3, 2, off_policy=False)]


ON_POLICY = World(3, 2, 2, off_policy=False)
ON_POLICY_LONG = World(4, 2, 2, off_policy=False)


def expected_gradient(
    method: PolicyGradient,
    world: World,
    process_reward: bool,
    state: dict[str, float] | None = None,
    divergence: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = lambda log_pi, log_ref: torch.full_like(log_pi, math.nan),
) -> np.ndarray:
    """Σ over groups of P_old(group) · gradient of the library's loss on that group, padding filled with NaN."""
    theta = torch.tensor(world.theta, requires_grad=True)
    log_pi = theta.log_softmax(1)
    padded = [y + (EOS,) * (world.horizon - len(y)) for y in world.trajectories]
    states = [world.states(y) + [0] * (world.horizon - len(y)) for y in world.trajectories]
    mask = torch.tensor([[t < len(y) for t in range(world.horizon)] for y in world.trajectories])

    def table(log_table: torch.Tensor) -> torch.Tensor:
        return torch.where(mask, log_table[torch.tensor(states), torch.tensor(padded)], math.nan)

    logp = table(log_pi)
    logp_old = table(torch.tensor(world.theta_old).log_softmax(1))
    logp_ref = table(torch.tensor(world.theta_ref).log_softmax(1))
    reward = torch.full(mask.shape, math.nan, dtype=torch.float64)
    for i, rewards in enumerate(world.step_rewards):
        reward[i, : len(rewards)] = torch.tensor(rewards, dtype=torch.float64)
    if not process_reward:
        reward = terminal(torch.nansum(reward, 1), mask)
    value = torch.tensor(world.values)[torch.tensor(states)]
    truncated = torch.tensor([world.truncated(y) for y in world.trajectories])
    entropy = -(log_pi.exp() * log_pi).sum(1)[torch.tensor(states)]
    kl = divergence(log_pi, torch.tensor(world.theta_ref).log_softmax(1)).sum(1)[torch.tensor(states)]
    log_old = torch.tensor(world.theta_old).log_softmax(1)
    entropy_old = -(log_old.exp() * log_old).sum(1)[torch.tensor(states)]
    parts = torch.tensor([parts_of(rewards) for rewards in world.step_rewards], dtype=torch.float64)
    total = torch.zeros((), dtype=torch.float64)
    start = method.initial_state() if state is None else state
    for members, orders in world.groups:
        rows = torch.tensor(members)
        batch = Batch(
            mask[rows], reward[rows], logp_old[rows], torch.zeros(len(members), dtype=torch.long), logp_ref=logp_ref[rows],
            value=value[rows], truncated=truncated[rows], entropy=entropy_old[rows],
            rewarded=mask[rows] if process_reward else None, parts=parts[rows], part_weights=PART_WEIGHTS,
        )  # fmt: skip
        prepared = method.prepare(batch, start)
        evaluation = PolicyOutputs(logp[rows], value=value[rows], entropy=entropy[rows], kl=kl[rows])
        loss = method.loss(prepared, evaluation, method.totals(prepared), start)
        probability = orders * math.exp(sum(sum(world.log_probs(world.theta_old, world.trajectories[i])) for i in members))
        total = total + probability * loss.value
    (gradient,) = torch.autograd.grad(total, theta)
    return gradient.numpy()


def gradient_of_expected_reward(world: World, beta: float) -> np.ndarray:
    """∇ Σ_y π(y)·(R(y) − β·log(π(y)/π_ref(y))), all y enumerated."""
    theta = torch.tensor(world.theta, requires_grad=True)
    log_pi, log_ref = theta.log_softmax(1), torch.tensor(world.theta_ref).log_softmax(1)
    objective = torch.zeros((), dtype=torch.float64)
    for y, rewards in zip(world.trajectories, world.step_rewards, strict=True):
        log_y = sum(log_pi[s, a] for s, a in zip(world.states(y), y, strict=True))
        ref_y = sum(log_ref[s, a] for s, a in zip(world.states(y), y, strict=True))
        objective = objective + log_y.exp() * (sum(rewards) - beta * (log_y - ref_y))
    (gradient,) = torch.autograd.grad(objective, theta)
    return gradient.numpy()


def assert_close(actual: np.ndarray, expected: np.ndarray) -> None:
    assert np.abs(expected).max() > 1e-3, "an oracle of zeros proves nothing"
    assert np.abs(actual - expected).max() < TOLERANCE


# Unbiased methods: minus the gradient of J, exactly.


@pytest.mark.parametrize("world", [ON_POLICY, ON_POLICY_LONG], ids=["T2V3", "T2V4"])
@pytest.mark.parametrize(
    ("preset", "process_reward", "beta"),
    [
        ("reinforce_total_return", False, 0.0),
        ("reinforce_total_return", True, 0.0),
        ("reinforce_reward_to_go", True, 0.0),
        ("reinforce_moving_average", False, 0.05),
        ("rloo", False, 0.05),
        ("rloo", True, 0.05),
    ],
)
def test_expected_gradient_is_that_of_the_expected_reward(world: World, preset: str, process_reward: bool, beta: float) -> None:
    actual = expected_gradient(resolve(preset), world, process_reward)
    assert_close(actual, -gradient_of_expected_reward(world, beta))


def test_a_moving_average_baseline_of_any_size_leaves_the_expected_gradient_unchanged() -> None:
    state = {"reward_average": -3.7, "reward_batches": 4.0}
    actual = expected_gradient(resolve("reinforce_moving_average"), ON_POLICY, False, state)
    assert_close(actual, -gradient_of_expected_reward(ON_POLICY, 0.05))


@pytest.mark.parametrize(("preset", "beta"), [("reinforce", 0.05), ("group mean without std", 0.0)])
def test_a_mean_that_holds_the_sample_itself_shrinks_the_expected_gradient_by_exactly_one_nth(preset: str, beta: float) -> None:
    method = resolve("reinforce") if preset == "reinforce" else replace(resolve("reinforce"), psi=group_mean(std=False), kl=None)
    actual = expected_gradient(method, ON_POLICY, False)
    assert_close(actual, -gradient_of_expected_reward(ON_POLICY, beta) * (ON_POLICY.group_size - 1) / ON_POLICY.group_size)


@pytest.mark.parametrize("psi", [gae(lam=1.0), k_step(k=9)], ids=["gae", "k_step"])
def test_an_arbitrary_critic_leaves_the_expected_gradient_unchanged_at_lambda_1(psi: gae | k_step) -> None:
    method = replace(resolve("reinforce_total_return"), psi=psi, critic=value_loss())
    assert_close(expected_gradient(method, ON_POLICY, True), -gradient_of_expected_reward(ON_POLICY, 0.0))


@pytest.mark.parametrize("preset", ["ppo", "ppo_penalty"])
def test_ppos_first_step_with_any_critic_is_the_gradient_of_the_kl_regularised_reward(preset: str) -> None:
    """On fresh samples the ratio is 1: clip and penalty are still, and the KL in the reward is part of what is maximised."""
    method = replace(resolve(preset), psi=gae(lam=1.0), aggregate=sequence_sum)
    assert method.kl is not None and method.kl.coefficient == 0.05
    assert_close(expected_gradient(method, ON_POLICY, True), -gradient_of_expected_reward(ON_POLICY, 0.05))
    without = expected_gradient(replace(method, kl=None), ON_POLICY, True)
    assert np.abs(without + gradient_of_expected_reward(ON_POLICY, 0.05)).max() > 1e-3


def distilled(world: World, divergence: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> np.ndarray:
    """The gradient of a divergence between policy and teacher, summed over the states that a completion visits."""
    theta = torch.tensor(world.theta, requires_grad=True)
    local = divergence(theta.log_softmax(1), torch.tensor(world.theta_ref).log_softmax(1)).sum(1)
    reached = torch.zeros(len(world.prefixes), dtype=torch.float64)
    for y in world.trajectories:
        probability = math.exp(sum(world.log_probs(world.theta, y)))
        for s in world.states(y):
            reached[s] += probability
    (oracle,) = torch.autograd.grad((reached * local).sum(), theta)
    return oracle.numpy()


def reverse_kl(log_pi: torch.Tensor, log_teacher: torch.Tensor) -> torch.Tensor:
    return log_pi.exp() * (log_pi - log_teacher)


def test_the_first_reward_alone_with_the_kl_as_reward_is_on_policy_distillation() -> None:
    """Minus the gradient of the reverse KL to the teacher at the states that the policy visits: A_t = log π_ref − log π."""
    distils = replace(resolve("reinforce_total_return"), psi=reward_to_go(0.0), kl=KL("reward", "k1", 1.0))
    silent = World(3, 2, 2, off_policy=False)
    silent.step_rewards = [[0.0] * len(rewards) for rewards in silent.step_rewards]
    oracle = distilled(ON_POLICY, reverse_kl)
    assert_close(expected_gradient(distils, silent, True), oracle)
    # far-sighted credit is another objective
    whole = expected_gradient(replace(distils, psi=reward_to_go(1.0)), silent, True)
    assert np.abs(whole - oracle).max() > 1e-3


def test_distillation_on_sampled_tokens_or_over_the_vocabulary_has_one_expected_gradient() -> None:
    method = replace(resolve("distill"), aggregate=sequence_sum)
    assert method.kl is not None and not method.needs_reward
    oracle = distilled(ON_POLICY, reverse_kl)
    sampled = replace(method, kl=replace(method.kl, estimator="k1+"))
    assert_close(expected_gradient(sampled, ON_POLICY, False), oracle)
    assert_close(expected_gradient(method, ON_POLICY, False, divergence=reverse_kl), oracle)
    other = expected_gradient(replace(method, kl=replace(method.kl, estimator="k3")), ON_POLICY, False)
    assert np.abs(other - oracle).max() > 1e-3, "negative control: k3 pulls along the forward KL"
    reverse_of = distilled(ON_POLICY, lambda log_pi, log_teacher: log_teacher.exp() * (log_teacher - log_pi))
    assert np.abs(oracle - reverse_of).max() > 1e-3
    assert_close(other, reverse_of)


def test_control_an_arbitrary_critic_biases_the_gradient_at_lambda_0() -> None:
    method = replace(resolve("reinforce_total_return"), psi=gae(lam=0.0), critic=value_loss())
    difference = expected_gradient(method, ON_POLICY, True) + gradient_of_expected_reward(ON_POLICY, 0.0)
    assert np.abs(difference).max() > 1e-2


def test_the_entropy_bonus_adds_the_gradient_of_the_mean_entropy_of_visited_states() -> None:
    world = ON_POLICY
    theta = torch.tensor(world.theta, requires_grad=True)
    log_pi = theta.log_softmax(1)
    entropy = -(log_pi.exp() * log_pi).sum(1)
    mean = torch.zeros((), dtype=torch.float64)
    for members, orders in world.groups:
        visited = [s for i in members for s in world.states(world.trajectories[i])]
        probability = orders * math.exp(sum(sum(world.log_probs(world.theta, world.trajectories[i])) for i in members))
        mean = mean + probability * entropy[torch.tensor(visited)].mean()
    (oracle,) = torch.autograd.grad(mean, theta)
    plain = expected_gradient(resolve("dr_grpo"), world, False)
    with_bonus = expected_gradient(replace(resolve("dr_grpo"), entropy=bonus(0.3)), world, False)
    assert_close(with_bonus - plain, -0.3 * oracle.numpy())


# Methods with a stated bias: their own formula, step by step.


@dataclass
class Row:
    """What a formula may read of one trajectory, as Python floats."""

    now: list[float]
    old: list[float]
    ref: list[float]
    rewards: list[float]
    truncated: bool
    values: list[float]
    entropies: list[float]

    @property
    def length(self) -> int:
        return len(self.now)


def passes(advantage: float, ratio: float, low: float, high: float) -> float:
    """The mask M: 0 where clipping stops the gradient."""
    stopped = (advantage > 0 and ratio > 1 + high) or (advantage < 0 and ratio < 1 - low)
    return 0.0 if stopped else 1.0


def standardised(returns: list[float], divide: bool) -> list[float]:
    mean = sum(returns) / len(returns)
    if len(set(returns)) == 1:
        return [0.0] * len(returns)
    std = math.sqrt(sum((r - mean) ** 2 for r in returns) / (len(returns) - 1))
    return [(r - mean) / (std + 1e-4 if divide else 1.0) for r in returns]


def grpo(rows: list[Row]) -> list[list[float]]:
    advantages = standardised([sum(r.rewards) for r in rows], divide=True)
    out = []
    for row, a in zip(rows, advantages, strict=True):
        weight = 1 / (len(rows) * row.length)
        steps = []
        for now, old, ref in zip(row.now, row.old, row.ref, strict=True):
            rho = math.exp(now - old)
            steps.append(weight * (-a * rho * passes(a, rho, 0.2, 0.2) + 0.04 * (1 - math.exp(ref - now))))
        out.append(steps)
    return out


def dr_grpo(rows: list[Row]) -> list[list[float]]:
    advantages = standardised([sum(r.rewards) for r in rows], divide=False)
    return [
        [
            -a * math.exp(n - o) * passes(a, math.exp(n - o), 0.2, 0.2) / (1024 * len(rows))
            for n, o in zip(row.now, row.old, strict=True)
        ]
        for row, a in zip(rows, advantages, strict=True)
    ]


def dapo(rows: list[Row]) -> list[list[float]]:
    returns = [sum(r.rewards) for r in rows]
    advantages = standardised(returns, divide=True)
    kept = [len(set(returns)) > 1 and not row.truncated for row in rows]
    tokens = sum(row.length for row, k in zip(rows, kept, strict=True) if k)
    return [
        [
            -a * math.exp(n - o) * passes(a, math.exp(n - o), 0.2, 0.28) / tokens if k else 0.0
            for n, o in zip(row.now, row.old, strict=True)
        ]
        for row, a, k in zip(rows, advantages, kept, strict=True)
    ]


def gspo(rows: list[Row]) -> list[list[float]]:
    advantages = standardised([sum(r.rewards) for r in rows], divide=True)
    out = []
    for row, a in zip(rows, advantages, strict=True):
        s = math.exp(sum(n - o for n, o in zip(row.now, row.old, strict=True)) / row.length)
        out.append([-a * s * passes(a, s, 3e-4, 4e-4) / (row.length * len(rows))] * row.length)
    return out


def cispo(rows: list[Row]) -> list[list[float]]:
    advantages = standardised([sum(r.rewards) for r in rows], divide=True)
    tokens = sum(row.length for row in rows)
    return [
        [-a * min(math.exp(n - o), 5.0) / tokens for n, o in zip(row.now, row.old, strict=True)]
        for row, a in zip(rows, advantages, strict=True)
    ]


def rloo(rows: list[Row]) -> list[list[float]]:
    returns = [sum(row.rewards) - 0.05 * (sum(row.old) - sum(row.ref)) for row in rows]
    out = []
    for i, row in enumerate(rows):
        others = [r for j, r in enumerate(returns) if j != i]
        a = returns[i] - sum(others) / len(others)
        rho = math.exp(sum(row.now) - sum(row.old))
        out.append([-a * rho * passes(a, rho, 0.2, 0.2) / len(rows)] * row.length)
    return out


def reinforce_pp(rows: list[Row]) -> list[list[float]]:
    togo = []
    for row in rows:
        shaped = [r - 0.01 * (o - f) for r, o, f in zip(row.rewards, row.old, row.ref, strict=True)]
        togo.append([sum(shaped[t:]) for t in range(row.length)])
    flat = [g for steps in togo for g in steps]
    mean = sum(flat) / len(flat)
    std = math.sqrt(sum((g - mean) ** 2 for g in flat) / (len(flat) - 1))
    out = []
    for row, steps in zip(rows, togo, strict=True):
        coefficients = []
        for g, now, old in zip(steps, row.now, row.old, strict=True):
            a, rho = (g - mean) / (std + 1e-8), math.exp(now - old)
            coefficients.append(-a * rho * passes(a, rho, 0.2, 0.2) / len(flat))
        out.append(coefficients)
    return out


def ppo_advantages(rows: list[Row]) -> list[list[float]]:
    """GAE at λ = 1 over rewards that carry the KL, whitened over all tokens of the batch."""
    raw = []
    for row in rows:
        shaped = [r - 0.05 * (o - f) for r, o, f in zip(row.rewards, row.old, row.ref, strict=True)]
        raw.append([sum(shaped[t:]) - row.values[t] for t in range(row.length)])
    flat = [a for steps in raw for a in steps]
    mean = sum(flat) / len(flat)
    std = math.sqrt(sum((a - mean) ** 2 for a in flat) / (len(flat) - 1))
    return [[(a - mean) / (std + 1e-8) for a in steps] for steps in raw]


def ppo(rows: list[Row]) -> list[list[float]]:
    advantages, total = ppo_advantages(rows), sum(row.length for row in rows)
    ratios = [[math.exp(n - o) for n, o in zip(row.now, row.old, strict=True)] for row in rows]
    both = [zip(a, r, strict=True) for a, r in zip(advantages, ratios, strict=True)]
    return [[-a * rho * passes(a, rho, 0.2, 0.2) / total for a, rho in steps] for steps in both]


def ppo_penalty(rows: list[Row]) -> list[list[float]]:
    advantages, total = ppo_advantages(rows), sum(row.length for row in rows)
    ratios = [[math.exp(n - o) for n, o in zip(row.now, row.old, strict=True)] for row in rows]
    both = [zip(a, r, strict=True) for a, r in zip(advantages, ratios, strict=True)]
    return [[(-a * rho + 1.0 * (rho - 1)) / total for a, rho in steps] for steps in both]


def raft(rows: list[Row]) -> list[list[float]]:
    returns = [sum(row.rewards) for row in rows]
    best = returns.index(max(returns))
    return [[-1.0 / row.length if i == best else 0.0] * row.length for i, row in enumerate(rows)]


def reinforce(rows: list[Row]) -> list[list[float]]:
    returns = [sum(row.rewards) - 0.05 * (sum(row.old) - sum(row.ref)) for row in rows]
    mean = sum(returns) / len(rows)
    return [[-(r - mean) / len(rows)] * row.length for r, row in zip(returns, rows, strict=True)]


def reinforce_pp_baseline(rows: list[Row]) -> list[list[float]]:
    returns = [sum(row.rewards) for row in rows]
    above = [r - sum(returns) / len(returns) for r in returns]
    flat = [a for a, row in zip(above, rows, strict=True) for _ in range(row.length)]
    mean = sum(flat) / len(flat)
    std = math.sqrt(sum((a - mean) ** 2 for a in flat) / (len(flat) - 1))
    out = []
    for a, row in zip(above, rows, strict=True):
        whitened_a, steps = (a - mean) / (std + 1e-8), []
        for now, old, ref in zip(row.now, row.old, row.ref, strict=True):
            rho = math.exp(now - old)
            steps.append((-whitened_a * rho * passes(whitened_a, rho, 0.2, 0.2) + 0.01 * (now - ref)) / len(flat))
        out.append(steps)
    return out


def opo(rows: list[Row]) -> list[list[float]]:
    returns, tokens = [sum(row.rewards) for row in rows], sum(row.length for row in rows)
    baseline = sum(r * row.length for r, row in zip(returns, rows, strict=True)) / tokens
    return [[-(r - baseline) / tokens] * row.length for r, row in zip(returns, rows, strict=True)]


def clipped_higher(rows: list[Row], advantages: list[float]) -> list[list[float]]:
    tokens, out = sum(row.length for row in rows), []
    for a, row in zip(advantages, rows, strict=True):
        ratios = [math.exp(n - o) for n, o in zip(row.now, row.old, strict=True)]
        out.append([-a * rho * passes(a, rho, 0.2, 0.28) / tokens for rho in ratios])
    return out


def maxrl(rows: list[Row]) -> list[list[float]]:
    returns = [sum(row.rewards) for row in rows]
    mean = sum(returns) / len(returns)
    return clipped_higher(rows, [(r - mean) / mean if mean else 0.0 for r in returns])


def pass_at_2(rows: list[Row]) -> list[list[float]]:
    """By all pairs: the best of each, standardised over the pairs; a completion gets the mean of those that hold it."""
    right = [float(sum(row.rewards) > 1.5) for row in rows]
    pairs = list(itertools.combinations(range(len(rows)), 2))
    best = [max(right[i] for i in pair) for pair in pairs]
    mean = sum(best) / len(best)
    std = math.sqrt(sum((b - mean) ** 2 for b in best) / len(best))
    holding = [[b for pair, b in zip(pairs, best, strict=True) if i in pair] for i in range(len(rows))]
    return clipped_higher(rows, [sum((b - mean) / std for b in mine) / len(mine) if std else 0.0 for mine in holding])


def sapo(rows: list[Row]) -> list[list[float]]:
    advantages = standardised([sum(r.rewards) for r in rows], divide=True)
    out = []
    for row, a in zip(rows, advantages, strict=True):
        tau, steps = (1.0 if a > 0 else 1.05), []
        for now, old in zip(row.now, row.old, strict=True):
            rho = math.exp(now - old)
            gate = 1 / (1 + math.exp(-tau * (rho - 1)))
            steps.append(-a * 4 * gate * (1 - gate) * rho / (len(rows) * row.length))
        out.append(steps)
    return out


def dppo(rows: list[Row]) -> list[list[float]]:
    advantages, tokens = standardised([sum(r.rewards) for r in rows], divide=True), sum(row.length for row in rows)
    out = []
    for row, a in zip(rows, advantages, strict=True):
        steps = []
        for now, old in zip(row.now, row.old, strict=True):
            moved = math.exp(now) - math.exp(old)
            held = moved > 0.15 if a > 0 else moved < -0.15
            steps.append(0.0 if held else -a * min(math.exp(now - old), 20.0) / tokens)
        out.append(steps)
    return out


def prime_ipo(rows: list[Row]) -> list[list[float]]:
    advantages, tokens = standardised([sum(r.rewards) for r in rows], divide=False), sum(row.length for row in rows)
    out = []
    for row, a in zip(rows, advantages, strict=True):
        pairs = [(math.exp(now), math.exp(old)) for now, old in zip(row.now, row.old, strict=True)]
        out.append([-a * p / q / tokens if abs(p - q) <= 0.3 else 0.0 for p, q in pairs])
    return out


def vespo(rows: list[Row]) -> list[list[float]]:
    advantages, tokens = standardised([sum(r.rewards) for r in rows], divide=True), sum(row.length for row in rows)
    out = []
    for row, a in zip(rows, advantages, strict=True):
        w = math.prod(math.exp(now) / math.exp(old) for now, old in zip(row.now, row.old, strict=True))
        phi = w**3 * math.exp(2 - 2 * w) if a < 0 else w**2 * math.exp(3 - 3 * w)
        out.append([-a * phi / tokens] * row.length)
    return out


def gmpo(rows: list[Row]) -> list[list[float]]:
    advantages = standardised([sum(r.rewards) for r in rows], divide=True)
    out = []
    for row, a in zip(rows, advantages, strict=True):
        logs = [n - o for n, o in zip(row.now, row.old, strict=True)]
        free = [x < 0.4 if a > 0 else x > -0.4 for x in logs]
        mean = math.exp(sum(min(x, 0.4) if a > 0 else max(x, -0.4) for x in logs) / row.length)
        out.append([-a * mean * f / (row.length * len(rows)) for f in free])
    return out


def by_gae(rows: list[Row], lams: list[float], beta: float, high: float) -> list[list[float]]:
    """PPO by GAE with a λ for each row, whitened over all tokens."""
    raw = []
    for row, lam in zip(rows, lams, strict=True):
        shaped = [r - beta * (o - f) for r, o, f in zip(row.rewards, row.old, row.ref, strict=True)]
        ahead = [*row.values[1 : row.length], 0.0]
        deltas = [r + following - v for r, following, v in zip(shaped, ahead, row.values, strict=True)]
        raw.append([sum(lam**j * d for j, d in enumerate(deltas[t:])) for t in range(row.length)])
    flat = [a for steps in raw for a in steps]
    mean = sum(flat) / len(flat)
    std = math.sqrt(sum((a - mean) ** 2 for a in flat) / (len(flat) - 1))
    out = []
    for row, steps in zip(rows, raw, strict=True):
        ratios = [math.exp(n - o) for n, o in zip(row.now, row.old, strict=True)]
        scaled = [(a - mean) / (std + 1e-8) for a in steps]
        out.append([-a * rho * passes(a, rho, 0.2, high) / len(flat) for a, rho in zip(scaled, ratios, strict=True)])
    return out


def vc_ppo(rows: list[Row]) -> list[list[float]]:
    return by_gae(rows, [0.95] * len(rows), 0.0, 0.2)


def vapo(rows: list[Row]) -> list[list[float]]:
    """The imitation divides by the steps of right answers, the rest by all."""
    learnt = by_gae(rows, [max(0.0, 1 - 1 / (0.8 * row.length)) for row in rows], 0.0, 0.28)
    right = [sum(row.rewards) >= 0.5 for row in rows]
    steps = sum(row.length for row, good in zip(rows, right, strict=True) if good)
    return [[c - (0.1 / steps if good else 0.0) for c in cs] for cs, good in zip(learnt, right, strict=True)]


def with_advantages(rows: list[Row], advantages: list[list[float]]) -> list[list[float]]:
    """GRPO's loss with another advantage for each step."""
    out = []
    for row, steps in zip(rows, advantages, strict=True):
        ratios = [math.exp(n - o) for n, o in zip(row.now, row.old, strict=True)]
        pulls = [0.04 * (1 - math.exp(ref - now)) for now, ref in zip(row.now, row.ref, strict=True)]
        terms = [-a * rho * passes(a, rho, 0.2, 0.2) + pull for a, rho, pull in zip(steps, ratios, pulls, strict=True)]
        out.append([term / (len(rows) * row.length) for term in terms])
    return out


def gdpo(rows: list[Row]) -> list[list[float]]:
    columns = zip(*(parts_of(row.rewards) for row in rows), strict=True)
    scaled = [standardised(list(column), divide=True) for column in columns]
    sums = [sum(w * column[i] for w, column in zip(PART_WEIGHTS, scaled, strict=True)) for i in range(len(rows))]
    return with_advantages(rows, [[a] * row.length for a, row in zip(standardised(sums, divide=True), rows, strict=True)])


def process_grpo(rows: list[Row]) -> list[list[float]]:
    flat = iter(standardised([r for row in rows for r in row.rewards], divide=True))
    scaled = [[next(flat) for _ in row.rewards] for row in rows]
    return with_advantages(rows, [[sum(steps[t:]) for t in range(len(steps))] for steps in scaled])


def top_entropy(rows: list[Row]) -> list[list[float]]:
    bound = float(np.quantile([h for row in rows for h in row.entropies], 0.4))
    weights = dapo(rows)
    return [[w * (h >= bound) for w, h in zip(ws, row.entropies, strict=True)] for ws, row in zip(weights, rows, strict=True)]


def covariances(rows: list[Row], advantages: list[float]) -> list[list[float]]:
    tokens = sum(row.length for row in rows)
    mean_logp = sum(o for row in rows for o in row.old) / tokens
    mean_a = sum(a * row.length for a, row in zip(advantages, rows, strict=True)) / tokens
    return [[(o - mean_logp) * (a - mean_a) for o in row.old] for a, row in zip(advantages, rows, strict=True)]


def clip_cov(rows: list[Row]) -> list[list[float]]:
    """Every step within the bounds is left out."""
    advantages = standardised([sum(r.rewards) for r in rows], divide=True)
    tokens, out = sum(row.length for row in rows), []
    for a, row, cs in zip(advantages, rows, covariances(rows, advantages), strict=True):
        ratios = [math.exp(n - o) for n, o in zip(row.now, row.old, strict=True)]
        terms = [-a * rho * passes(a, rho, 0.2, 0.2) / tokens for rho in ratios]
        out.append([0.0 if 0.05 < c < 5 else term for c, term in zip(cs, terms, strict=True)])
    return out


def kl_cov(rows: list[Row]) -> list[list[float]]:
    """The one step with the greatest covariance has the penalty."""
    advantages = standardised([sum(r.rewards) for r in rows], divide=True)
    tokens, cs = sum(row.length for row in rows), covariances(rows, advantages)
    places = [(i, t) for i, row in enumerate(rows) for t in range(row.length)]
    marked = max(places, key=lambda place: cs[place[0]][place[1]])
    out = []
    for i, (a, row) in enumerate(zip(advantages, rows, strict=True)):
        logs = [n - o for n, o in zip(row.now, row.old, strict=True)]
        signs = [math.copysign(1.0, x) if x and (i, t) == marked else 0.0 for t, x in enumerate(logs)]
        out.append([(-a * math.exp(x) + sign) / tokens for x, sign in zip(logs, signs, strict=True)])
    return out


def from_formula(formula: Callable[[list[Row]], list[list[float]]], world: World) -> np.ndarray:
    """Σ over groups of P_old(group) · Σ c[i][t] · (onehot(a_t) − π(·|s_t))."""
    gradient = np.zeros_like(world.theta)
    old = np.exp(world.theta_old) / np.exp(world.theta_old).sum(1, keepdims=True)
    rows = [
        Row(
            world.log_probs(world.theta, y),
            world.log_probs(world.theta_old, y),
            world.log_probs(world.theta_ref, y),
            r,
            world.truncated(y),
            [float(world.values[s]) for s in world.states(y)],
            [-sum(p * math.log(p) for p in old[s]) for s in world.states(y)],
        )
        for y, r in zip(world.trajectories, world.step_rewards, strict=True)
    ]
    pi = np.exp(world.theta) / np.exp(world.theta).sum(1, keepdims=True)
    for members, orders in world.groups:
        probability = orders * math.exp(sum(sum(rows[i].old) for i in members))
        for i, coefficients in zip(members, formula([rows[i] for i in members]), strict=True):
            y = world.trajectories[i]
            for s, action, c in zip(world.states(y), y, coefficients, strict=True):
                score = -pi[s].copy()
                score[action] += 1
                gradient[s] += probability * c * score
    return gradient


FORMULAS = [
    grpo, dr_grpo, dapo, gspo, cispo, rloo, reinforce_pp, ppo, ppo_penalty, raft, reinforce, reinforce_pp_baseline, opo, maxrl,
    sapo, dppo, prime_ipo, vespo, gmpo, vc_ppo, vapo, gdpo, process_grpo, top_entropy, clip_cov, kl_cov,
]  # fmt: skip
# presets whose own numbers would decide nothing in so small a world
BUILT = {
    "top_entropy": replace(resolve("top_entropy"), keep=(*resolve("dapo").keep, aggregate.top_entropy(0.6))),
    "clip_cov": replace(resolve("clip_cov"), keep=(clip_covariance(0.99, 0.05, 5.0),)),
    "vapo": replace(resolve("vapo"), psi=whitened(length_gae(0.8)), surrogate=with_imitation(clip(0.2, 0.28), 0.1, right=0.5)),
}


@pytest.mark.parametrize("world", worlds(), ids=["off-policy T2 G3", "on-policy T3 G2"])
@pytest.mark.parametrize("formula", FORMULAS, ids=[f.__name__ for f in FORMULAS])
def test_expected_gradient_is_that_of_the_stated_formula(world: World, formula: Callable[[list[Row]], list[list[float]]]) -> None:
    process_reward = formula in (reinforce_pp, ppo, ppo_penalty, vc_ppo, vapo, process_grpo)
    method = BUILT[formula.__name__] if formula.__name__ in BUILT else resolve(formula.__name__)
    actual = expected_gradient(method, world, process_reward)
    scale = 1024 if formula is dr_grpo else 1
    assert_close(actual * scale, from_formula(formula, world) * scale)


def test_every_preset_is_held_by_an_enumeration() -> None:
    unbiased = {"reinforce_total_return", "reinforce_reward_to_go", "reinforce_moving_average"}
    held = unbiased | {"pass_at_k", "distill"} | {f.__name__ for f in FORMULAS}
    assert set(PRESETS) == held, "write the method's formula without psigrad, and add it to FORMULAS"


@pytest.mark.parametrize("off_policy", [False, True])
def test_pass_at_k_is_the_mean_over_all_choices_of_k(off_policy: bool) -> None:
    world = World(3, 2, 4, off_policy)
    method = replace(resolve("pass_at_k"), psi=pass_at_k(2, right=1.5))
    assert_close(expected_gradient(method, world, False), from_formula(pass_at_2, world))


@pytest.mark.parametrize("group_size", [2, 3])
def test_maxrl_follows_the_first_terms_of_the_logarithm_of_the_success_rate(group_size: int) -> None:
    """Rewards of 0 and 1: minus the gradient of Σ_{k<G} pass@k / k, pass@k = 1 − (1 − p)^k."""
    world = World(3, 2, group_size, off_policy=False)
    for rewards in world.step_rewards:
        rewards[:] = [0.0] * (len(rewards) - 1) + [float(sum(rewards) > 0.5)]
    theta = torch.tensor(world.theta, requires_grad=True)
    log_pi = theta.log_softmax(1)
    success = torch.zeros((), dtype=torch.float64)
    for y, rewards in zip(world.trajectories, world.step_rewards, strict=True):
        success = success + sum(rewards) * sum(log_pi[s, a] for s, a in zip(world.states(y), y, strict=True)).exp()
    terms = sum((1 - (1 - success) ** k) / k for k in range(1, group_size))
    (oracle,) = torch.autograd.grad(terms, theta)
    method = replace(resolve("maxrl"), ratio=none, surrogate=score, aggregate=sequence_sum)
    assert 0.05 < float(success) < 0.95
    assert_close(expected_gradient(method, world, False), -oracle.numpy())


def test_the_off_policy_world_reaches_every_bound() -> None:
    world = worlds()[0]
    ratios = [
        math.exp(n - o)
        for y in world.trajectories
        for n, o in zip(world.log_probs(world.theta, y), world.log_probs(world.theta_old, y), strict=True)
    ]
    assert min(ratios) < 0.8 and max(ratios) > 5.0
    old, now = (np.exp(table) / np.exp(table).sum(1, keepdims=True) for table in (world.theta_old, world.theta))
    assert np.abs(now - old).min() < 0.3 < np.abs(now - old).max()


def test_best_of_group_with_ones_kept_equals_top_1_up_to_the_token_count() -> None:
    world = ON_POLICY
    rows = replace(resolve("raft"), psi=best_of_group, keep=())

    def best_over_all_tokens(members: list[Row]) -> list[list[float]]:
        tokens = sum(row.length for row in members)
        return [[c * row.length / tokens for c in steps] for row, steps in zip(members, raft(members), strict=True)]

    assert_close(expected_gradient(rows, world, False), from_formula(best_over_all_tokens, world))
    assert resolve("raft").psi is ones
