"""Returns and advantages along a trajectory against slow sums over plain lists; a critic of actions."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from edge_batches import world
from hypothesis import given, settings
from hypothesis import strategies as st

from psigrad.config.algorithms import resolve
from psigrad.objective import Batch, PolicyGradient, PolicyOutputs
from psigrad.objective.parts import aggregate, ratio
from psigrad.objective.parts.advantage import (
    action_advantage,
    action_value,
    gae,
    k_step,
    length_gae,
    needs_of,
    reward_to_go,
    td_residual,
    total_return,
    whitened,
)
from psigrad.objective.parts.aggregate import not_truncated, token_mean
from psigrad.objective.parts.critic import value_loss
from psigrad.objective.parts.ratio import token
from psigrad.objective.parts.surrogate import clip, score


def random_batch(seed: int, n: int = 4, t: int = 7) -> Batch:
    g = torch.Generator().manual_seed(seed)
    mask = torch.rand(n, t, generator=g) < 0.7

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    return Batch(mask, normal(n, t), normal(n, t), torch.arange(n), value=normal(n, t), last_value=normal(n))


def compact(batch: Batch, row: int) -> tuple[list[float], list[float]]:
    """Rewards and values of the chosen steps of a row; the values end with the bootstrap."""
    chosen = batch.mask[row]
    return batch.reward[row][chosen].tolist(), [*batch.value[row][chosen].tolist(), batch.last_value[row].item()]


def assert_rows(actual: torch.Tensor, batch: Batch, oracle) -> None:
    for row in range(len(actual)):
        expected = torch.tensor(oracle(*compact(batch, row)), dtype=torch.float64)
        torch.testing.assert_close(actual[row][batch.mask[row]], expected, rtol=0, atol=1e-12)
    assert not actual[~batch.mask].any()


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.floats(0, 1), st.floats(0, 1))
def test_gae_equals_the_double_sum(seed: int, gamma: float, lam: float) -> None:
    def oracle(r: list[float], v: list[float]) -> list[float]:
        delta = [r[t] + gamma * v[t + 1] - v[t] for t in range(len(r))]
        return [sum((gamma * lam) ** (u - t) * delta[u] for u in range(t, len(r))) for t in range(len(r))]

    batch = random_batch(seed)
    assert_rows(gae(gamma, lam)(batch), batch, oracle)


def test_gae_at_lambda_1_is_monte_carlo_minus_value_and_at_lambda_0_the_td_residual() -> None:
    batch = random_batch(3)

    def monte_carlo(r: list[float], v: list[float]) -> list[float]:
        n = len(r)
        return [sum(0.9 ** (u - t) * r[u] for u in range(t, n)) + 0.9 ** (n - t) * v[n] - v[t] for t in range(n)]

    def td(r: list[float], v: list[float]) -> list[float]:
        return [r[t] + 0.9 * v[t + 1] - v[t] for t in range(len(r))]

    assert_rows(gae(0.9, 1.0)(batch), batch, monte_carlo)
    assert_rows(gae(0.9, 0.0)(batch), batch, td)
    assert_rows(td_residual(0.9)(batch), batch, td)


@pytest.mark.parametrize("k", [1, 2, 3, 50])
def test_k_step_advantage_is_k_rewards_then_the_critic(k: int) -> None:
    def oracle(r: list[float], v: list[float]) -> list[float]:
        n = len(r)
        out = []
        for t in range(n):
            end = min(t + k, n)
            out.append(sum(0.9 ** (u - t) * r[u] for u in range(t, end)) + 0.9 ** (end - t) * v[end] - v[t])
        return out

    batch = random_batch(5)
    assert_rows(k_step(k, 0.9)(batch), batch, oracle)


def test_reward_to_go_and_total_return_discount_chosen_steps_only() -> None:
    batch = random_batch(8)
    assert_rows(
        reward_to_go(0.9)(batch),
        batch,
        lambda r, v: [sum(0.9 ** (u - t) * r[u] for u in range(t, len(r))) for t in range(len(r))],
    )
    assert_rows(total_return(0.9)(batch), batch, lambda r, v: [sum(0.9**u * r[u] for u in range(len(r)))] * len(r))


@pytest.mark.parametrize("psi", [gae(0.9, 0.8), whitened(gae(0.9, 0.8))], ids=["plain", "whitened"])
def test_the_critic_is_fitted_to_the_unwhitened_advantage_plus_its_old_value(psi: gae | whitened) -> None:
    # Per step c_V·½(V − R)²/tokens with R = A_gae + V_old; the gradient is c_V·(V − R)/tokens.
    batch = random_batch(4)
    method = PolicyGradient(psi, token, clip(), token_mean, critic=value_loss(0.3))
    value = batch.value.clone() + 0.5
    value.requires_grad_()
    prepared = method.prepare(batch, {})
    loss = method.loss(prepared, PolicyOutputs(batch.logp_old, value=value), method.totals(prepared), {})
    loss.value.backward()
    tokens, mean_error = int(batch.mask.sum()), 0.0
    for row in range(len(batch.mask)):
        r, v = compact(batch, row)
        delta = [r[t] + 0.9 * v[t + 1] - v[t] for t in range(len(r))]
        returns = [sum(0.72 ** (u - t) * delta[u] for u in range(t, len(r))) + v[t] for t in range(len(r))]
        errors = [v[t] + 0.5 - returns[t] for t in range(len(r))]
        mean_error += sum(e**2 / 2 for e in errors) / tokens
        assert value.grad[row][batch.mask[row]].tolist() == pytest.approx([0.3 * e / tokens for e in errors], abs=1e-12)
    assert loss.terms["value_loss"].item() == pytest.approx(mean_error)
    assert (loss.value - loss.terms["policy_loss"]).item() == pytest.approx(0.3 * mean_error)
    apart = method.policy_loss(prepared, PolicyOutputs(batch.logp_old), method.totals(prepared), {})
    critic = method.critic_loss(prepared, value.detach(), method.totals(prepared))
    assert (apart.value + critic.value).item() == loss.value.item() and "value_loss" not in apart.terms
    assert apart.terms | critic.terms == loss.terms


def test_a_finished_trajectory_needs_no_bootstrap() -> None:
    batch = Batch(
        torch.ones(1, 2, dtype=torch.bool),
        torch.tensor([[1.0, 2.0]]),
        torch.zeros(1, 2),
        torch.zeros(1).long(),
        value=torch.tensor([[5.0, 7.0]]),
    )
    assert td_residual(0.5)(batch).tolist() == [[1 + 3.5 - 5, 2 - 7]]


def test_a_row_that_a_filter_leaves_out_teaches_the_critic_nothing() -> None:
    batch = replace(random_batch(4), truncated=torch.tensor([True, False, False, False]))
    method = PolicyGradient(gae(0.9, 0.8), token, clip(), token_mean, keep=(not_truncated,), critic=value_loss())
    prepared = method.prepare(batch, {})
    value = batch.value.clone().requires_grad_()
    loss = method.critic_loss(prepared, value, method.totals(prepared))
    loss.value.backward()
    assert not value.grad[0].any() and value.grad[1].any()
    other = batch.value.clone()
    other[0] += 1.0
    assert method.critic_loss(prepared, other, method.totals(prepared)).value == loss.value


def test_without_a_critic_there_is_no_critic_loss() -> None:
    batch = random_batch(4)
    method = PolicyGradient(reward_to_go(), token, clip(), token_mean)
    prepared = method.prepare(batch, {})
    with pytest.raises(ValueError, match="has no critic"):
        method.critic_loss(prepared, batch.value, method.totals(prepared))


def test_a_lambda_of_1_needs_no_discount():
    assert gae().gamma == 1.0 and gae().lam == 1.0


def by_hand(deltas: list[float], discount: float) -> list[float]:
    out: list[float] = []
    for delta in reversed(deltas):
        out.insert(0, delta + discount * (out[0] if out else 0.0))
    return out


@pytest.mark.parametrize("width", [5, 16, 17, 40])
@pytest.mark.parametrize(("gamma", "lam"), [(0.97, 0.9), (1.0, 1.0), (0.9, 0.0)])
def test_gae_of_long_rows_is_the_plain_loop(width, gamma, lam):
    rows, _ = world(width=width)
    found, adaptive = gae(gamma, lam)(rows), length_gae(0.5, gamma)(rows)
    for i, length in enumerate(rows.mask.sum(1).tolist()):
        value = [*rows.value[i, :length].tolist(), 0.0]
        deltas = [float(rows.reward[i, t]) + gamma * value[t + 1] - value[t] for t in range(length)]
        assert found[i, :length].tolist() == pytest.approx(by_hand(deltas, gamma * lam), abs=1e-12)
        own = max(0.0, 1 - 1 / (0.5 * length))
        assert adaptive[i, :length].tolist() == pytest.approx(by_hand(deltas, gamma * own), abs=1e-12)
        assert (found[i, length:] == 0).all() and (adaptive[i, length:] == 0).all()


MASK = torch.tensor([[True, True, False], [True, False, True]])


BATCH = Batch(
    mask=MASK,
    reward=torch.zeros(2, 3),
    logp_old=torch.zeros(2, 3),
    group=torch.arange(2),
    value=torch.tensor([[1.0, 2.0, float("nan")], [3.0, float("inf"), 4.0]]),
    action_value=torch.tensor([[1.5, 1.0, float("nan")], [3.0, 9.0, 4.25]], requires_grad=True),
)


def method(psi, critic=None) -> PolicyGradient:
    return PolicyGradient(psi, ratio.none, score, aggregate.sequence_sum, critic=critic)


def test_they_are_the_critics_numbers_on_chosen_steps_and_0_elsewhere():
    assert action_value(BATCH).tolist() == [[1.5, 1.0, 0.0], [3.0, 0.0, 4.25]]
    assert action_advantage(BATCH).tolist() == [[0.5, -1.0, 0.0], [0.0, 0.0, 0.25]]
    assert not action_value(BATCH).requires_grad


def test_the_critic_of_states_learns_from_the_critic_of_actions():
    prepared = method(action_advantage, value_loss()).prepare(BATCH, {})
    assert torch.equal(prepared.returns, BATCH.action_value)


def test_they_follow_their_rows():
    assert action_value(BATCH.select(torch.tensor([1]))).tolist() == [[3.0, 0.0, 4.25]]


def test_what_is_missing_is_said():
    assert needs_of(action_advantage) == {"value", "action_value"} and needs_of(action_value) == {"action_value"}
    with pytest.raises(ValueError, match="no `action_value`"):
        method(action_value).prepare(replace(BATCH, action_value=None), {})
    with pytest.raises(ValueError, match="no `value`"):
        action_advantage(replace(BATCH, value=None))
    with pytest.raises(ValueError, match="critic is None"):
        method(action_advantage)
    with pytest.raises(ValueError, match="action_value has shape"):
        replace(BATCH, action_value=torch.zeros(2, 4))


def test_they_have_short_names():
    spec = {"ratio": "none", "surrogate": "score", "aggregate": "sequence_sum"}
    assert resolve({**spec, "psi": "action_value"}).psi is action_value
    assert resolve({**spec, "psi": "action_advantage", "critic": {}}).psi is action_advantage
