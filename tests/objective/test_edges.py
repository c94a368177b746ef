"""The edges of the algebra: half precision, ratios beyond exp(20), numbers that are not finite, dynamic sampling."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from edge_batches import batch

from psigrad.config.algorithms import resolve, resolve_loss
from psigrad.objective import Batch, PolicyOutputs
from psigrad.objective.parts.advantage import gae, length_gae, reward_to_go, whitened
from psigrad.objective.parts.critic import value_loss
from psigrad.objective.parts.group_advantage import pass_at_k
from psigrad.objective.parts.off_policy import off_policy_mask
from psigrad.objective.parts.ratio import (
    KL,
    MAX_LOG_RATIO,
    adaptive,
    divergence_rejection,
    estimate,
    exp_ratio,
    masked_importance,
    truncated_importance,
)
from psigrad.objective.parts.surrogate import (
    adapt,
    clip,
    clip_fractions,
    divergence_mask,
    geometric_clip,
    kl_penalty,
    measure_kl,
    soft_clip,
    truncated_weight,
    unclipped,
)
from psigrad.objective.preferences.preference_loss import KahnemanTversky, Labelled, Pairs
from psigrad.objective.slopes import slopes


def gradient(method, rows: Batch, logp: torch.Tensor) -> torch.Tensor:
    leaf = logp.clone().requires_grad_()
    prepared = method.prepare(rows, method.initial_state())
    method.loss(prepared, PolicyOutputs(leaf), method.totals(prepared), prepared.state).value.backward()
    return leaf.grad


# Half precision


@pytest.mark.parametrize("name", ["gspo", "grpo", "dapo", "cispo"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_rewards_leave_every_gradient_as_it_is(name, dtype):
    method = replace(resolve(name), kl=None, keep=())
    logp = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)).round(decimals=1)
    logp = logp.to(dtype).float()  # the same numbers in both precisions
    for moved in (0.0, 1e-4):
        half = gradient(method, batch([1.0, 0.0, 1.0, 0.0], logp, dtype), logp + moved)
        full = gradient(method, batch([1.0, 0.0, 1.0, 0.0], logp), logp + moved)
        torch.testing.assert_close(half, full)
        assert (full != 0).all()


# Ratios beyond exp(20)


def test_a_ratio_beyond_its_bound_keeps_its_value_and_has_a_gradient():
    x = torch.tensor([-3.0, 0.0, 19.0, 20.0, 21.0, 700.0], dtype=torch.float64, requires_grad=True)
    ratio = exp_ratio(x)
    torch.testing.assert_close(ratio, x.detach().clamp(max=MAX_LOG_RATIO).exp(), rtol=0, atol=0)
    (slope,) = torch.autograd.grad(ratio.sum(), x)
    torch.testing.assert_close(slope, ratio.detach(), rtol=0, atol=0)


def test_rloo_finds_its_way_back_from_a_completion_that_became_far_too_likely():
    method, logp = replace(resolve("rloo"), kl=None), torch.full((2, 2000), -2.0)
    moved = logp.clone()
    moved[1] += 0.011  # 22 nats in all, with a negative advantage
    found = gradient(method, batch([1.0, 0.0], logp), moved)
    assert torch.isfinite(found).all()
    assert (found[1] > 0).all()  # downhill: less likely
    assert found[0].abs().max() > 0  # the other one has ratio 1


@pytest.mark.parametrize("surrogate", [unclipped, clip(0.2, 0.2)])
def test_closed_slopes_agree_with_autograd_beyond_the_bound(surrogate):
    method = replace(resolve("grpo"), kl=None, surrogate=surrogate)
    old = torch.zeros(4, 3, dtype=torch.float64)
    rows = batch([1.0, 0.0, 3.0, -2.0], old, torch.float64)
    logp = torch.tensor([[0.1, 25.0, -30.0]] * 4, dtype=torch.float64)
    prepared = method.prepare(rows, {})
    totals = method.totals(prepared)
    torch.testing.assert_close(slopes(method, prepared, totals).logp(logp), gradient(method, rows, logp))


# Numbers that are not finite


@pytest.mark.parametrize("estimator", ["k3", "k3+"])
def test_k3_stays_finite_where_the_reference_is_far_above_the_policy(estimator):
    d = torch.tensor([-120.0, -19.0, 0.0, 3.0], requires_grad=True)
    value = estimate(estimator, d)
    (slope,) = torch.autograd.grad(value.sum(), d)
    assert torch.isfinite(value).all() and torch.isfinite(slope).all()
    assert slope[0] < 0  # towards the reference
    near = d.detach()[1:].double()
    torch.testing.assert_close(value.detach()[1:].double(), torch.expm1(-near) + near, rtol=1e-6, atol=0)


# Dynamic sampling


def test_dynamic_sampling_looks_at_the_metric_where_there_is_one():
    reward = [1.0, 1.0, 1.0, 0.6, 1.0, 0.0, 0.0, 0.0]  # the first group is right throughout, and one was long
    rows = batch(reward, torch.zeros(8, 2), group=[0] * 4 + [1] * 4)
    correct = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0])
    method = replace(resolve("dapo"), keep=resolve("dapo").keep[:1])
    assert method.prepare(rows, {}).keep.tolist() == [True] * 8
    assert method.prepare(replace(rows, metric=correct), {}).keep.tolist() == [False] * 4 + [True] * 4


# The penalty, KTO and conjugate gradients


def test_the_penalty_follows_the_kl_after_the_update():
    mask = torch.tensor([[True, True, False], [True, False, False]])
    old, now = torch.zeros(2, 3), torch.tensor([[0.1, -0.2, 9.0], [0.3, 9.0, 9.0]])
    moved = torch.tensor([0.1, -0.2, 0.3])
    expected = float((moved.exp() - 1 - moved).mean())
    assert measure_kl(now, old, mask) == pytest.approx(expected, rel=1e-5)
    penalty = kl_penalty(1.0, target=expected / 2)
    assert adapt(penalty, {"penalty_coefficient": 1.0}, expected) == {"penalty_coefficient": 2.0}


def test_ktos_weights_have_the_precision_of_its_log_probs():
    rows = Labelled(
        torch.zeros(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64), torch.tensor([True, False]),
        torch.zeros((), dtype=torch.float64),
    )  # fmt: skip
    loss = KahnemanTversky(desirable_weight=0.65, undesirable_weight=0.35).loss(rows, 2, 1).value
    assert float(loss) == 0.25  # (0.65 + 0.35) · ½ / 2, where float32's weights give 0.2499999925


def test_negative_control_the_plain_clamp_has_no_gradient_beyond_the_bound():
    x = torch.tensor([22.0], requires_grad=True)
    (slope,) = torch.autograd.grad(x.clamp(max=MAX_LOG_RATIO).exp().sum(), x)
    assert float(slope) == 0.0


# Slots that see more


def world(rows: int = 6, width: int = 20, seed: int = 0) -> tuple[Batch, torch.Tensor]:
    """Rows of all lengths up to `width`, more than the 16 steps that take another path, and log-probs of a policy that moved."""
    random = torch.Generator().manual_seed(seed)
    draw = lambda: torch.randn(rows, width, generator=random, dtype=torch.float64)  # noqa: E731
    lengths = torch.randint(1, width + 1, (rows,), generator=random)
    lengths[0] = width
    mask = torch.arange(width) < lengths[:, None]
    old = -draw().abs()
    given = {"value": draw(), "logp_sampler": old + 0.1 * draw(), "logp_ref": old + 0.3 * draw()}
    return Batch(mask, draw(), old, torch.arange(rows) // 3, **given), old + 0.2 * draw()


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


def test_a_critic_may_have_an_estimator_of_returns_of_its_own():
    rows, _ = world()
    apart = replace(resolve("ppo"), kl=None, psi=gae(1.0, 0.5), critic=value_loss(returns=gae(1.0, 1.0)))
    together = replace(apart, critic=value_loss())
    prepared, plain = apart.prepare(rows, {}), together.prepare(rows, {})
    torch.testing.assert_close(prepared.advantage, plain.advantage, rtol=0, atol=0)
    to_go = reward_to_go()(rows)  # λ = 1: the critic learns the return itself
    torch.testing.assert_close(prepared.returns[rows.mask], to_go[rows.mask])
    assert not torch.allclose(plain.returns[rows.mask], to_go[rows.mask])
    with pytest.raises(ValueError, match=r"critic\.returns is whitened or has a memory"):
        replace(resolve("ppo"), critic=value_loss(returns=whitened(gae())))


def test_a_surrogate_of_whole_sequences_reads_no_padding():
    rows, now = world()
    for surrogate in (geometric_clip(), off_policy_mask(), off_policy_mask(geometric_clip(), 0.01)):
        method = replace(resolve("gmpo"), surrogate=surrogate)
        found = gradient(method, rows, now)
        noisy = gradient(method, replace(rows, logp_old=rows.logp_old + 7.0 * ~rows.mask), now + 5.0 * ~rows.mask)
        torch.testing.assert_close(found, noisy, rtol=0, atol=0)
        assert (found[~rows.mask] == 0).all() and (found != 0).any()


SPLIT = ["grpo", "gspo", "dapo", "sapo", "dppo", "prime_ipo", "vespo", "gmpo", "opo", "reinforce_pp_baseline", "ppo", "cispo"]


@pytest.mark.parametrize("name", SPLIT)
def test_any_split_of_long_rows_of_several_groups_gives_one_gradient(name):
    rows, now = world()
    method = replace(resolve(name), keep=())
    method = method if method.corrects else replace(method, correction=truncated_importance(2.0, floor=0.5))
    whole, parts = now.clone().requires_grad_(), now.clone().requires_grad_()
    prepared = method.prepare(rows, method.initial_state())
    totals = method.totals(prepared)
    method.loss(prepared, PolicyOutputs(whole, value=whole.detach() + whole), totals, prepared.state).value.backward()
    for cut in ([0], [1, 2, 3], [4, 5]):
        leaf = parts[cut]
        outputs = PolicyOutputs(leaf, value=leaf.detach() + leaf)
        method.loss(prepared.select(torch.tensor(cut)), outputs, totals, prepared.state).value.backward()
    torch.testing.assert_close(whole.grad, parts.grad, rtol=1e-12, atol=1e-14)
    assert whole.grad.abs().max() > 1e-4


# Corrections


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_corrections_are_their_formulas(level):
    rows, _ = world()
    cut, masked = truncated_importance(1.02, level, 0.97)(rows), masked_importance(1.02, level, 0.97)(rows)
    seen = set()
    for i, length in enumerate(rows.mask.sum(1).tolist()):
        gaps = (rows.logp_old - rows.logp_sampler)[i, :length].tolist()
        whole = math.fsum(gaps) / (length if level == "geometric" else 1)
        for t in range(length):
            weight = math.exp(gaps[t] if level == "token" else whole)
            inside = 0.97 <= weight <= 1.02
            seen.add(inside)
            assert float(cut[i, t]) == pytest.approx(min(max(weight, 0.97), 1.02))
            assert float(masked[i, t]) == pytest.approx(weight if inside else 0.0)
        assert (cut[i, length:].clamp(max=0.97) == cut[i, length:]).all()
    assert seen == {True, False}


def test_sequences_are_rejected_by_their_divergence_where_their_ratios_cancel():
    mask = torch.ones(3, 4, dtype=torch.bool)
    gap = torch.tensor([[0.5, -0.5, 0.5, -0.5], [0.01, -0.02, 0.0, 0.01], [0.05, 0.05, 0.05, 0.05]])
    rows = Batch(mask, torch.zeros(3, 4), gap, torch.zeros(3).long(), logp_sampler=torch.zeros(3, 4))
    assert divergence_rejection(0.01)(rows)[:, 0].tolist() == [0.0, 1.0, 1.0]
    assert masked_importance(1.1, "geometric", 0.9)(rows)[0, 0] > 0  # the geometric mean sees nothing


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: truncated_importance(1.0, floor=1.0),
        lambda: masked_importance(level="word"),
        lambda: divergence_rejection(0),
        lambda: soft_clip(0),
        lambda: divergence_mask(0),
        lambda: geometric_clip(-1),
        lambda: off_policy_mask(delta=0),
        lambda: pass_at_k(0),
        lambda: length_gae(0),
    ],
)
def test_parameters_that_mean_nothing_are_refused(wrong):
    with pytest.raises(ValueError, match="expected"):
        wrong()


# What a careless change would break without a word


def test_a_margin_of_a_pair_is_added_to_that_of_the_loss():
    zero = torch.zeros(2, dtype=torch.float64)
    chosen, rejected, lengths = zero - 1.0, zero - 3.0, torch.tensor([2, 2])
    simpo = resolve_loss({"preset": "simpo", "margin": 0.5})

    def value(margin) -> float:
        return float(simpo.loss(Pairs(chosen, rejected, lengths, lengths, margin=margin), 2, 4).value)

    apart = simpo.beta * (-1.0 / 2 + 3.0 / 2)
    for margins in ([0.0, 0.0], [0.3, 1.1]):
        expected = sum(math.log1p(math.exp(-(apart - 0.5 - own))) for own in margins) / 2
        assert value(torch.tensor(margins, dtype=torch.float64)) == pytest.approx(expected)
    assert value(None) == pytest.approx(value(torch.zeros(2, dtype=torch.float64)))


def test_an_adaptive_kl_counts_completions_and_no_padding():
    method = replace(resolve("rloo"), kl=KL("reward", "k1", adaptive(0.1, target=1.0, horizon=10)))
    old, ref = torch.zeros(5, 3), torch.full((5, 3), -1.0)
    mask = torch.tensor([[True] * 3] * 4 + [[False] * 3])
    rows = Batch(mask, torch.rand(5, 3), old, torch.tensor([0, 0, 1, 1, 2]), logp_ref=ref)
    after = method.prepare(rows, method.initial_state()).state
    assert after["kl_coefficient"] == pytest.approx(0.1 * (1 + 0.2 * 4 / 10))  # 3 nats of 1: the error is cut at 0.2


def test_cispo_counts_as_truncated_what_was_to_grow():
    log_ratio = torch.tensor([[2.0, 2.0, -2.0, 0.0]])
    advantage = torch.tensor([[1.0, -1.0, 1.0, 1.0]])
    assert clip_fractions(truncated_weight(5.0), log_ratio, advantage)["cispo_clip_ratio"].tolist() == [
        [True, False, False, False]
    ]
