"""KL estimators by exact enumeration of one choice, with π_ref and π_old of our own; ratios and corrections by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from edge_batches import batch, gradient, outcomes, rows, world

from psigrad.config.algorithms import resolve
from psigrad.objective import Batch, PolicyOutputs
from psigrad.objective.parts import ratio
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
from psigrad.objective.parts.surrogate import adapt, geometric_clip, kl_penalty

G = torch.Generator().manual_seed(0)
THETA, REF, OLD = (torch.randn(5, generator=G, dtype=torch.float64) for _ in range(3))


def log_softmax(theta: torch.Tensor) -> torch.Tensor:
    return theta - theta.exp().sum().log()


def kl_and_gradient(reverse: bool) -> tuple[float, torch.Tensor]:
    """KL(π‖π_ref) or KL(π_ref‖π) as a sum over all actions, and its gradient."""
    theta = THETA.clone().requires_grad_()
    p, q = log_softmax(theta), log_softmax(REF)
    kl = (p.exp() * (p - q)).sum() if reverse else (q.exp() * (q - p)).sum()
    (gradient,) = torch.autograd.grad(kl, theta)
    return kl.item(), gradient


def expectation(per_step, sampled_from: torch.Tensor) -> tuple[float, torch.Tensor]:
    """E over actions of `sampled_from` of per_step(logp) and of its gradient; the sampling is not differentiated."""
    theta = THETA.clone().requires_grad_()
    mean = (log_softmax(sampled_from).exp() * per_step(log_softmax(theta))).sum()
    (gradient,) = torch.autograd.grad(mean, theta)
    return mean.item(), gradient


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool((a - b).abs().max() < 1e-12)


@pytest.mark.parametrize(("estimator", "biased"), [("k1", False), ("k3", False), ("k1+", False), ("k3+", False), ("k2", True)])
def test_the_value_is_unbiased_but_for_k2(estimator: str, biased: bool) -> None:
    value, _ = expectation(lambda p: estimate(estimator, p - log_softmax(REF)), THETA)
    bias = abs(value - kl_and_gradient(reverse=True)[0])
    assert bias > 0.05 if biased else bias <= 1e-12


@pytest.mark.parametrize("estimator", ["k2", "k1+", "k3+"])
def test_the_gradient_is_that_of_the_reverse_kl(estimator: str) -> None:
    _, gradient = expectation(lambda p: estimate(estimator, p - log_softmax(REF)), THETA)
    assert close(gradient, kl_and_gradient(reverse=True)[1])


@pytest.mark.parametrize("estimator", ["k2", "k1+", "k3+"])
def test_the_corrected_forms_have_the_gradient_of_k2_at_every_single_sample(estimator: str) -> None:
    d = torch.tensor([-0.7, 0.0, 1.3], dtype=torch.float64, requires_grad=True)
    estimate(estimator, d).sum().backward()
    assert torch.equal(d.grad, d.detach())


def test_the_gradient_of_k1_is_zero_and_that_of_k3_is_the_forward_kl() -> None:
    _, k1 = expectation(lambda p: estimate("k1", p - log_softmax(REF)), THETA)
    _, k3 = expectation(lambda p: estimate("k3", p - log_softmax(REF)), THETA)
    assert close(k1, torch.zeros(5, dtype=torch.float64))
    assert close(k3, kl_and_gradient(reverse=False)[1])
    assert not close(k3, kl_and_gradient(reverse=True)[1])


@pytest.mark.parametrize("estimator", ["k1", "k3", "k2", "k1+", "k3+"])
@pytest.mark.parametrize("sampled_from", [THETA, OLD], ids=["on-policy", "off-policy"])
def test_importance_weights_make_the_gradient_right_on_and_off_policy(estimator: str, sampled_from: torch.Tensor) -> None:
    kl = KL("loss", estimator, 0.1, importance_weighted=True)
    value, gradient = expectation(lambda p: kl.per_step(p, log_softmax(sampled_from), log_softmax(REF)), sampled_from)
    assert close(gradient, kl_and_gradient(reverse=True)[1])
    if estimator != "k2":
        assert value == pytest.approx(kl_and_gradient(reverse=True)[0], abs=1e-12)


def test_control_without_weights_old_samples_give_another_gradient() -> None:
    _, gradient = expectation(lambda p: estimate("k3+", p - log_softmax(REF)), OLD)
    assert not close(gradient, kl_and_gradient(reverse=True)[1])


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_gradcheck_of_the_differentiable_forms(estimator: str) -> None:
    weighted = KL("loss", estimator, 1.0, importance_weighted=estimator != "k2")
    logp = log_softmax(THETA).clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda p: estimate(estimator, p - log_softmax(REF)), logp)
    if estimator != "k2":
        assert torch.autograd.gradcheck(lambda p: weighted.per_step(p, log_softmax(OLD), log_softmax(REF)), logp)


def test_the_exact_kl_enters_the_loss_with_the_same_weights_as_the_surrogate() -> None:
    mask = torch.tensor([[True, True, False], [True, False, False]])
    exact = torch.tensor([[0.5, 0.25, float("nan")], [2.0, float("inf"), 9.0]], dtype=torch.float64, requires_grad=True)
    zeros = torch.zeros(2, 3, dtype=torch.float64)
    method = replace(resolve("grpo"), kl=KL("loss", "exact", 0.1))
    prepared = method.prepare(Batch(mask, zeros, zeros, torch.zeros(2).long()), {})
    loss = method.loss(prepared, PolicyOutputs(zeros, kl=exact), method.totals(prepared), {})
    loss.value.backward()
    assert loss.value.item() == pytest.approx(0.1 * ((0.5 + 0.25) / 2 + 2.0) / 2)
    assert exact.grad.tolist() == [[0.025, 0.025, 0.0], [0.05, 0.0, 0.0]]
    assert loss.terms["kl"].item() == pytest.approx(2.75 / 3)


def test_the_penalty_surrogate_has_the_gradient_of_kl_old_to_new() -> None:
    def kl_part(p: torch.Tensor) -> torch.Tensor:
        return kl_penalty(1.0)(p, p - log_softmax(OLD), torch.zeros(5, dtype=torch.float64))

    theta = THETA.clone().requires_grad_()
    old = log_softmax(OLD)
    kl = (old.exp() * (old - log_softmax(theta))).sum()
    (oracle,) = torch.autograd.grad(kl, theta)
    value, gradient = expectation(kl_part, OLD)
    assert value == pytest.approx(kl.item(), abs=1e-12) and close(gradient, oracle)


def test_the_penalty_coefficient_doubles_and_halves() -> None:
    part = kl_penalty(1.0, target=0.01)
    state = {"penalty_coefficient": 1.0}
    assert adapt(part, state, 0.016) == {"penalty_coefficient": 2.0}
    assert adapt(part, state, 0.006) == {"penalty_coefficient": 0.5}
    assert adapt(part, state, 0.012) == state
    assert adapt(kl_penalty(1.0), state, 9.0) == state


def test_the_measured_distance_from_the_old_policy_is_the_mean_of_its_unbiased_estimate() -> None:
    # Ratios 2 and 1: (2 - 1 - ln 2 + 0) / 2.
    method = replace(resolve("dr_grpo"), surrogate=kl_penalty(1.0))
    zeros = torch.zeros(2, 1, dtype=torch.float64)
    prepared = method.prepare(Batch(torch.ones(2, 1, dtype=torch.bool), zeros, zeros, torch.zeros(2).long()), {})
    now = PolicyOutputs(torch.tensor([[2.0], [1.0]], dtype=torch.float64).log())
    loss = method.loss(prepared, now, method.totals(prepared), method.initial_state())
    assert loss.terms["policy/approxkl_avg"].item() == pytest.approx((1 - math.log(2)) / 2)


def test_the_penalty_coefficient_of_the_state_is_the_one_used() -> None:
    method = replace(resolve("dr_grpo"), surrogate=kl_penalty(1.0, target=0.1))
    mask = torch.ones(2, 1, dtype=torch.bool)
    batch = Batch(mask, torch.zeros(2, 1), torch.zeros(2, 1), torch.zeros(2).long())
    prepared = method.prepare(batch, method.initial_state())
    now = PolicyOutputs(torch.full((2, 1), -0.5))

    def value(coefficient: float) -> float:
        return method.loss(prepared, now, method.totals(prepared), {"penalty_coefficient": coefficient}).value.item()

    assert value(3.0) == pytest.approx(3 * value(1.0)) and value(1.0) > 0


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"where": "loss", "estimator": "k1"}, r"gradient is 0 in expectation.*use 'k1\+'"),
        ({"where": "reward", "estimator": "exact"}, "expected k1, k2 or k3, not importance-weighted"),
        ({"where": "reward", "estimator": "k3+"}, "expected k1, k2 or k3, not importance-weighted"),
        ({"where": "reward", "estimator": "k1", "importance_weighted": True}, "expected k1, k2 or k3, not importance-weighted"),
        ({"where": "loss", "estimator": "exact", "importance_weighted": True}, "importance weights need an estimator"),
        ({"where": "nowhere"}, "expected 'reward' or 'loss'"),
        ({"estimator": "k9"}, "expected one of k1, k2, k3"),
        ({"coefficient": -1.0}, "expected 0 or more"),
    ],
)
def test_a_penalty_that_cannot_work_is_refused(arguments: dict, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        KL(**arguments)


@pytest.mark.parametrize(("kl", "factor"), [(100.0, 1.2), (6.6, 1.1), (6.0, 1.0), (5.4, 0.9), (0.0, 0.8), (-5.0, 0.8)])
def test_an_adaptive_coefficient_moves_by_at_most_a_fifth_per_horizon(kl: float, factor: float) -> None:
    assert adaptive(0.5, target=6.0, horizon=10).update(0.5, kl, sequences=10) == pytest.approx(0.5 * factor)


def test_an_adaptive_coefficient_must_be_able_to_grow() -> None:
    with pytest.raises(ValueError, match="could never grow"):
        adaptive(initial=0.0)


def test_k1_in_the_loss_is_refused_whatever_the_string_is_made_of():
    estimator = "".join(["k", "1"])  # equal to the literal, and not the same object
    with pytest.raises(ValueError, match="whose gradient is 0 in expectation"):
        KL(where="loss", estimator=estimator)


def test_a_row_without_steps_leaves_ratios_and_losses_finite():
    mask = torch.tensor([[True, True], [False, False]])
    logp, old = torch.tensor([[-1.0, -2.0], [0.0, 0.0]]), torch.tensor([[-1.5, -2.0], [0.0, 0.0]])
    found = ratio.sequence(logp, old, mask)
    torch.testing.assert_close(found, torch.tensor([[0.25, 0.25], [0.0, 0.0]]))
    loss = geometric_clip()(logp, logp - old, torch.tensor([[1.0, 1.0], [0.0, 0.0]]), mask)
    torch.testing.assert_close(loss, torch.tensor([[-math.exp(0.2), -math.exp(0.2)], [0.0, 0.0]]))


@pytest.mark.parametrize(("gap", "kept"), [(0.1, True), (0.16, False)])
def test_a_sequence_of_one_step_is_judged_by_that_step(gap, kept):
    """exp(gap) − 1 − gap is 0.005 and 0.014, on either side of the limit."""
    batch = rows([[1]], logp_old=[[-1.0]], logp_sampler=torch.tensor([[-1.0 - gap]]))
    assert bool(divergence_rejection(limit=0.01)(batch)[0, 0]) is kept


@pytest.mark.parametrize(("gap", "weight"), [(0.139, 0.0), (0.138, 1.0), (-0.139, 1.0), (-0.145, 0.0)])
def test_a_sequence_is_rejected_by_k3_of_the_trainer_over_the_sampler(gap, weight):
    """One step: e^0.139 − 1 − 0.139 = 0.010124 is above 0.01 and e^−0.139 − 1 + 0.139 = 0.009228 below it."""
    one = outcomes([0.0], 1, logp_old=torch.tensor([[-1.0 + gap]]), logp_sampler=torch.tensor([[-1.0]]))
    assert divergence_rejection(0.01)(one).tolist() == [[weight]]


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


@pytest.mark.parametrize("estimator", ["k3", "k3+"])
def test_k3_stays_finite_where_the_reference_is_far_above_the_policy(estimator):
    d = torch.tensor([-120.0, -19.0, 0.0, 3.0], requires_grad=True)
    value = estimate(estimator, d)
    (slope,) = torch.autograd.grad(value.sum(), d)
    assert torch.isfinite(value).all() and torch.isfinite(slope).all()
    assert slope[0] < 0  # towards the reference
    near = d.detach()[1:].double()
    torch.testing.assert_close(value.detach()[1:].double(), torch.expm1(-near) + near, rtol=1e-6, atol=0)


def test_negative_control_the_plain_clamp_has_no_gradient_beyond_the_bound():
    x = torch.tensor([22.0], requires_grad=True)
    (slope,) = torch.autograd.grad(x.clamp(max=MAX_LOG_RATIO).exp().sum(), x)
    assert float(slope) == 0.0


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


def test_an_adaptive_kl_counts_completions_and_no_padding():
    method = replace(resolve("rloo"), kl=KL("reward", "k1", adaptive(0.1, target=1.0, horizon=10)))
    old, ref = torch.zeros(5, 3), torch.full((5, 3), -1.0)
    mask = torch.tensor([[True] * 3] * 4 + [[False] * 3])
    rows = Batch(mask, torch.rand(5, 3), old, torch.tensor([0, 0, 1, 1, 2]), logp_ref=ref)
    after = method.prepare(rows, method.initial_state()).state
    assert after["kl_coefficient"] == pytest.approx(0.1 * (1 + 0.2 * 4 / 10))  # 3 nats of 1: the error is cut at 0.2
