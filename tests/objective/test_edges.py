"""The edges of the algebra: half precision, ratios beyond exp(20), numbers that are not finite, dynamic sampling."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from psigrad.config.algorithms import resolve
from psigrad.objective import Batch, PolicyOutputs, terminal
from psigrad.objective.kl import estimate
from psigrad.objective.penalty import adapted, kl_penalty, measured_kl
from psigrad.objective.preference_loss import KahnemanTversky, Labelled
from psigrad.objective.ratio import MAX_LOG_RATIO, exp_ratio
from psigrad.objective.slopes import slopes
from psigrad.objective.surrogate import clip, unclipped
from psigrad.objective.trust_region import conjugate_gradients


def batch(reward, logp_old, dtype=torch.float32, group=None, **given) -> Batch:
    logp_old = torch.as_tensor(logp_old, dtype=dtype)
    mask = torch.ones(logp_old.shape, dtype=torch.bool)
    reward = terminal(torch.tensor(reward, dtype=dtype), mask)
    return Batch(mask, reward, logp_old, torch.tensor(group or [0] * len(logp_old)), **given)


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


def test_a_batch_holds_no_less_than_float32():
    rows = batch([1, 0], [[0.0, 1.0]] * 2, torch.bfloat16, value=torch.ones(2, 2, dtype=torch.float16))
    assert rows.reward.dtype == rows.logp_old.dtype == rows.value.dtype == torch.float32
    assert batch([1, 0], [[0.0]] * 2, torch.float64).reward.dtype == torch.float64


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


@pytest.mark.parametrize("field", ["logp_old", "logp_ref", "logp_sampler", "value"])
@pytest.mark.parametrize("bad", [float("-inf"), float("nan")])
def test_a_number_that_is_not_finite_is_refused_by_name(field, bad):
    given = {name: torch.zeros(3, 4) for name in ("logp_ref", "logp_sampler", "value")}
    rows = {"logp_old": torch.zeros(3, 4), **given}
    rows[field] = rows[field].clone()
    rows[field][1, 2] = bad
    with pytest.raises(ValueError, match=rf"The {field} of rows \[1\] is NaN or infinite"):
        resolve("ppo").prepare(batch([1.0, 0.0, 2.0], **rows), resolve("ppo").initial_state())


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
    assert measured_kl(now, old, mask) == pytest.approx(expected, rel=1e-5)
    penalty = kl_penalty(1.0, target=expected / 2)
    assert adapted(penalty, {"penalty_coefficient": 1.0}, expected) == {"penalty_coefficient": 2.0}


def test_ktos_weights_have_the_precision_of_its_log_probs():
    rows = Labelled(
        torch.zeros(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64), torch.tensor([True, False]),
        torch.zeros((), dtype=torch.float64),
    )  # fmt: skip
    loss = KahnemanTversky(desirable_weight=0.65, undesirable_weight=0.35).loss(rows, 2, 1).value
    assert float(loss) == 0.25  # (0.65 + 0.35) · ½ / 2, where float32's weights give 0.2499999925


@pytest.mark.parametrize("scale", [1.0, 1e-6, 1e-12])
def test_conjugate_gradients_do_not_depend_on_the_scale_of_the_gradient(scale):
    torch.manual_seed(0)
    root = torch.randn(6, 6, dtype=torch.float64)
    matrix, b = root @ root.T + torch.eye(6, dtype=torch.float64), torch.randn(6, dtype=torch.float64)
    found = conjugate_gradients(lambda v: matrix @ v, scale * b, 20)
    torch.testing.assert_close(found / scale, torch.linalg.solve(matrix, b), rtol=1e-4, atol=1e-5)


def test_a_gradient_of_zero_is_no_direction():
    zero = torch.zeros(3)
    assert conjugate_gradients(lambda v: v, zero, 5).tolist() == [0.0, 0.0, 0.0]


def test_negative_control_the_plain_clamp_has_no_gradient_beyond_the_bound():
    x = torch.tensor([22.0], requires_grad=True)
    (slope,) = torch.autograd.grad(x.clamp(max=MAX_LOG_RATIO).exp().sum(), x)
    assert float(slope) == 0.0
