"""Hand-worked numbers: REINFORCE and RLOO on a few episodes, and what clipping leaves of value and gradient."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from psigrad.config.algorithms import resolve
from psigrad.objective import Batch, PolicyGradient, PolicyOutputs, terminal
from psigrad.objective.parts.advantage import batch_mean, group_mean, leave_one_out, moving_average, whitened
from psigrad.objective.parts.aggregate import has_signal, sequence_sum
from psigrad.objective.parts.ratio import KL, none
from psigrad.objective.parts.surrogate import clip, clip_fractions, dual_clip, score, truncated_weight


def run(
    method: PolicyGradient, logp: list[list[float]], ref: list[list[float]], scores: list[float], group: list[int]
):  # type-free helper
    leaf = torch.tensor(logp, dtype=torch.float64, requires_grad=True)
    mask = torch.ones_like(leaf, dtype=torch.bool)
    reward = terminal(torch.tensor(scores, dtype=torch.float64), mask)
    batch = Batch(mask, reward, leaf, torch.tensor(group), logp_ref=torch.tensor(ref, dtype=torch.float64))
    prepared = method.prepare(batch, method.initial_state())
    loss = method.loss(prepared, PolicyOutputs(leaf), method.totals(prepared), prepared.state)
    loss.value.backward()
    return prepared, loss.value.item(), leaf.grad


def test_reinforce_gives_the_numbers_worked_by_hand() -> None:
    # log-ratios: [-1, .1, -.3] sum -1.2; [-.5, .2, -.2] sum -.5. Rewards: 1 + .12 = 1.12; .5 + .05 = .55. Mean .835.
    # Advantages ±.285. Loss: mean(.285 · 22.9, -.285 · 20) = .285 · 2.9 / 2 = .41325. Gradient: ∓.285 / 2 on each token.
    method = replace(resolve("reinforce"), kl=KL("reward", "k1", 0.1))
    logp, ref = [[-12.3, -8.3, -2.3], [-10.0, -7.0, -3.0]], [[-11.3, -8.4, -2.0], [-9.5, -7.2, -2.8]]
    prepared, loss, gradient = run(method, logp, ref, [1.0, 0.5], [0, 1])
    torch.testing.assert_close(prepared.advantage[:, 0], torch.tensor([0.285, -0.285], dtype=torch.float64))
    assert loss == pytest.approx(0.41325, abs=1e-12)
    torch.testing.assert_close(gradient, torch.tensor([[-0.1425] * 3, [0.1425] * 3], dtype=torch.float64))
    assert prepared.metrics["objective/kl"] == pytest.approx(-0.85)


RLOO_LOGP = [
    [-12.3, -8.3, -2.3], [-10.0, -7.0, -3.0], [-10.5, -12.2, -9.1],
    [-11.0, -10.3, -1.3], [-11.1, -11.1, -0.8], [-8.2, -11.9, -0.1],
    [-1.8, -2.1, -0.2], [-0.7, -3.5, -0.1], [-1.0, -2.2, -1.1],
]  # fmt: skip
RLOO_REF = [
    [-11.8, -8.4, -2.3], [-10.1, -7.2, -3.1], [-10.3, -12.9, -9.1],
    [-11.8, -9.7, -1.3], [-12.3, -11.9, -0.2], [-8.1, -12.0, -0.5],
    [-2.7, -2.0, -1.2], [-0.7, -3.6, -0.2], [-0.7, -1.2, -0.9],
]  # fmt: skip
# Sums of log-ratios, by hand: -.4, .4, .5 | .2, 1.4, .4 | 1.8, .2, -1.5. Rewards = score - .1 · sum:
# 1.04, 1.96, 2.95 | 1.98, 2.86, 3.96 | 2.82, 3.98, 5.15. Advantage = reward - mean of the other two:
RLOO_ADVANTAGE = [
    1.04 - 2.455, 1.96 - 1.995, 2.95 - 1.5,
    1.98 - 3.41, 2.86 - 2.97, 3.96 - 2.42,
    2.82 - 4.565, 3.98 - 3.985, 5.15 - 3.4,
]  # fmt: skip
RLOO_SUM = [-22.9, -20.0, -31.8, -22.6, -23.0, -20.2, -4.1, -4.3, -4.3]


def test_rloo_gives_the_numbers_worked_by_hand() -> None:
    method = replace(resolve("rloo"), kl=KL("reward", "k1", 0.1), ratio=none, surrogate=score, aggregate=sequence_sum)
    prepared, loss, gradient = run(method, RLOO_LOGP, RLOO_REF, [1, 2, 3, 2, 3, 4, 3, 4, 5], [0, 0, 0, 1, 1, 1, 2, 2, 2])
    advantage = torch.tensor(RLOO_ADVANTAGE, dtype=torch.float64)
    torch.testing.assert_close(prepared.advantage, advantage[:, None].expand(9, 3), rtol=0, atol=1e-12)
    assert loss == pytest.approx(sum(-a * s for a, s in zip(RLOO_ADVANTAGE, RLOO_SUM, strict=True)) / 9, abs=1e-12)
    torch.testing.assert_close(gradient, (-advantage / 9)[:, None].expand(9, 3), rtol=0, atol=1e-12)


def test_the_rloo_preset_has_the_same_gradient_on_fresh_samples() -> None:
    method = replace(resolve("rloo"), kl=KL("reward", "k1", 0.1))
    _, _, gradient = run(method, RLOO_LOGP, RLOO_REF, [1, 2, 3, 2, 3, 4, 3, 4, 5], [0, 0, 0, 1, 1, 1, 2, 2, 2])
    expected = -torch.tensor(RLOO_ADVANTAGE, dtype=torch.float64) / 9
    torch.testing.assert_close(gradient, expected[:, None].expand(9, 3), rtol=0, atol=1e-12)


# Clipping, eps = .2: (advantage, ratio) -> objective value and whether gradient passes.
CLIPPING = [
    (-5.0, 0.5, -4.0, False),
    (-5.0, 1.0, -5.0, True),
    (-5.0, 1.5, -7.5, True),
    (-1.0, 0.5, -0.8, False),
    (-1.0, 1.0, -1.0, True),
    (-1.0, 1.5, -1.5, True),
    (1.0, 0.5, 0.5, True),
    (1.0, 1.0, 1.0, True),
    (1.0, 1.5, 1.2, False),
    (5.0, 0.5, 2.5, True),
    (5.0, 1.0, 5.0, True),
    (5.0, 1.5, 6.0, False),
]


@pytest.mark.parametrize(("advantage", "ratio", "objective", "gradient_passes"), CLIPPING)
def test_clipping_table(advantage: float, ratio: float, objective: float, gradient_passes: bool) -> None:
    log_ratio = torch.tensor(ratio, dtype=torch.float64).log().requires_grad_()
    loss = clip(0.2, 0.2)(log_ratio, log_ratio, torch.tensor(advantage, dtype=torch.float64))
    loss.backward()
    assert -loss.item() == pytest.approx(objective)
    assert log_ratio.grad.item() == pytest.approx(-advantage * ratio if gradient_passes else 0.0)


def test_low_bounds_negative_and_high_bounds_positive_advantages() -> None:
    # clip(.1, .3): a positive advantage is stopped above 1.3, a negative one below .9.
    ratio = torch.tensor([1.25, 1.35, 0.95, 0.85], dtype=torch.float64)
    advantage = torch.tensor([2.0, 2.0, -2.0, -2.0], dtype=torch.float64)
    log_ratio = ratio.log().requires_grad_()
    loss = clip(0.1, 0.3)(log_ratio, log_ratio, advantage)
    loss.sum().backward()
    assert loss.tolist() == pytest.approx([-2.5, -2.6, 1.9, 1.8])
    assert log_ratio.grad.tolist() == pytest.approx([-2.5, 0.0, 1.9, 0.0])
    fractions = {key: hit.tolist() for key, hit in clip_fractions(clip(0.1, 0.3), log_ratio, advantage).items()}
    assert fractions["clip_ratio/high_mean"] == [False, True, False, False]
    assert fractions["clip_ratio/low_mean"] == [False, False, False, True]
    assert fractions["clip_ratio/region_mean"] == [False, True, False, True]


def test_dual_clip_bounds_a_negative_advantage_and_cispo_never_stops_a_gradient() -> None:
    log_ratio = torch.tensor([5.0, 5.0], dtype=torch.float64).log().requires_grad_()
    advantage = torch.tensor([-2.0, 2.0], dtype=torch.float64)
    assert dual_clip(0.2, 0.2, 3.0)(log_ratio, log_ratio, advantage).tolist() == pytest.approx([6.0, -2.4])
    truncated_weight(3.0)(log_ratio, log_ratio, advantage).sum().backward()
    assert log_ratio.grad.tolist() == pytest.approx([6.0, -6.0])


@pytest.mark.parametrize("reward", [0.1, 1 / 3, 0.7, 1e8 + 0.1, -0.3])
@pytest.mark.parametrize("psi", [group_mean(), group_mean(eps=0.0), group_mean(std=False), leave_one_out, batch_mean, whitened()])
def test_equal_rewards_give_advantage_exactly_zero(psi, reward: float) -> None:
    mask = torch.ones(8, 1, dtype=torch.bool)
    batch = Batch(mask, torch.full((8, 1), reward), torch.zeros(8, 1), torch.zeros(8, dtype=torch.long))
    assert torch.equal(psi(batch), torch.zeros(8, 1))
    assert not has_signal(batch).any()


def test_control_the_float_deviation_of_equal_rewards_is_not_zero() -> None:
    rewards = torch.full((7,), 0.1)
    assert (rewards - rewards.sum() / 7).abs().max() > 0 or rewards.std() > 0


def test_one_unequal_reward_is_signal() -> None:
    reward = torch.full((8, 1), 0.1)
    reward[3] = torch.nextafter(torch.tensor(0.1), torch.tensor(1.0))
    batch = Batch(torch.ones(8, 1, dtype=torch.bool), reward, torch.zeros(8, 1), torch.zeros(8, dtype=torch.long))
    assert has_signal(batch).all()
    reward = torch.tensor([[0.0], [1e-30]])  # the square of the difference is 0 in float32
    assert has_signal(Batch(torch.ones(2, 1, dtype=torch.bool), reward, torch.zeros(2, 1), torch.zeros(2).long())).all()


def test_moving_average_is_debiased_and_comes_from_earlier_batches_only() -> None:
    # Batch means 2 then 4, decay .9: after one batch m = .2, b = .2 / (1 - .9) = 2; after two m = .18 + .4 = .58, b = .58 / .19.
    psi = moving_average(0.9)
    state = psi.initial_state()
    baselines = []
    for mean in (2.0, 4.0, 0.0):
        batch = Batch(
            torch.ones(2, 1, dtype=torch.bool), torch.tensor([[mean - 1], [mean + 1]]), torch.zeros(2, 1), torch.zeros(2).long()
        )
        advantage, state = psi(batch, state)
        baselines.append(mean - advantage.mean().item())
    assert baselines == pytest.approx([0.0, 2.0, 0.58 / 0.19], abs=1e-6)


def test_the_adaptive_coefficient_follows_ziegler() -> None:
    # KL per sequence 3 · 1 = 3 nats against a target of 6: error -.5, clipped to -.2; 2 sequences, horizon 10: beta .1 · (1 -
    # .04).
    from psigrad.objective.parts.ratio import adaptive

    method = replace(resolve("grpo"), kl=KL("loss", "k3", adaptive(0.1, target=6.0, horizon=10)))
    batch = Batch(
        torch.ones(2, 3, dtype=torch.bool),
        torch.zeros(2, 3),
        torch.zeros(2, 3),
        torch.zeros(2).long(),
        logp_ref=-torch.ones(2, 3),
    )
    prepared = method.prepare(batch, method.initial_state())
    assert prepared.metrics["objective/kl"] == pytest.approx(3.0)
    assert prepared.metrics["objective/kl_coefficient"] == pytest.approx(0.1)
    assert prepared.state["kl_coefficient"] == pytest.approx(0.096)
