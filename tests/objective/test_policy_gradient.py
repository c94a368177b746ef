"""What must not matter: padding, row order, group numbers, micro-batches, observations, empty rows. Each with its control."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import pytest
import torch
from edge_batches import batch, gradient, outcomes, world
from hypothesis import given, settings
from hypothesis import strategies as st

from psigrad.config.algorithms import resolve
from psigrad.objective import Batch, PolicyGradient, PolicyOutputs, catalog
from psigrad.objective.catalog import DISTILL
from psigrad.objective.parts import ratio
from psigrad.objective.parts.advantage import gae, group_mean, leave_one_out, reward_to_go, whitened
from psigrad.objective.parts.aggregate import clip_covariance, has_signal, sequence_mean, token_mean
from psigrad.objective.parts.critic import bonus, value_loss
from psigrad.objective.parts.ratio import KL, masked_importance, token, truncated_importance
from psigrad.objective.parts.surrogate import clip, covariance_penalty, dual_clip, kl_penalty, unclipped, with_imitation

GRPO = resolve("grpo")
PRESETS = ("reinforce", "reinforce_reward_to_go", "rloo", "grpo", "dr_grpo", "dapo", "gspo", "cispo", "reinforce_pp", "raft")
METHODS = {name: resolve(name) for name in PRESETS} | {
    "everything": PolicyGradient(
        whitened(gae(0.9, 0.8)), token, dual_clip(), token_mean, kl=KL("loss", "k3+", 0.1, importance_weighted=True),
        critic=value_loss(0.5, clip=0.2), entropy=bonus(0.1), correction=truncated_importance(1.5),
    ),
    "masked sequences": replace(GRPO, correction=masked_importance(2.0), kl=KL("loss", "exact", 0.1)),
    "penalty": replace(GRPO, psi=reward_to_go(), surrogate=kl_penalty(0.3)),
    "top entropy": resolve("top_entropy"),
    # not from 0 on: where rewards are equal, rounding decides on which side of it the covariance lies
    "clipped covariance": replace(resolve("clip_cov"), keep=(clip_covariance(0.1, 1e-6, 5.0),)),
    "penalised covariance": replace(resolve("kl_cov"), surrogate=covariance_penalty(0.2)),
    "imitation": replace(resolve("vapo"), surrogate=with_imitation(clip(), 0.3, right=0.2)),
    "parts": resolve("gdpo"),
    "process": resolve("process_grpo"),
}  # fmt: skip
LEAVES = ("logp", "entropy", "value", "kl")
Case = tuple[Batch, PolicyOutputs]
methods = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS.keys())
seeds = st.integers(0, 10_000)
few = settings(max_examples=12, deadline=None)


def random_case(seed: int, n: int = 8, t: int = 5) -> Case:
    """Three groups of unequal size, observations in between, one group of equal rewards."""
    g = torch.Generator().manual_seed(seed)

    def normal() -> torch.Tensor:
        return torch.randn(n, t, generator=g, dtype=torch.float64)

    lengths = torch.randint(1, t + 1, (n,), generator=g)
    mask = (torch.arange(t) < lengths[:, None]) & (torch.rand(n, t, generator=g) < 0.8)
    mask[:, 0] = True
    group = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1])[:n]
    reward = normal()
    reward[group == 2] = 0.0
    logp = normal() * 0.3 - 1.5
    batch = Batch(
        mask, reward, logp + 0.3 * normal(), group, logp_ref=logp + 0.3 * normal(), logp_sampler=logp + 0.3 * normal(),
        value=normal(), last_value=normal()[:, 0], truncated=torch.rand(n, generator=g) < 0.2,
        inputs=list(range(n)), entropy=normal().exp(), rewarded=torch.rand(n, t, generator=g) < 0.5,
        parts=torch.where(torch.rand(n, 2, generator=g) < 0.2, torch.nan, normal()[:, :2]), part_weights=(1.0, 0.5),
    )  # fmt: skip
    return batch, PolicyOutputs(logp, normal().exp(), normal(), normal() ** 2)


def run(method: PolicyGradient, case: Case, splits: list[torch.Tensor] | None = None, local: bool = False):
    """Summed loss, terms and the gradient [N,T] of every model output, over the micro-batches `splits`.

    `local` is the classic mistake: each micro-batch is normalised by its own counts and the results are averaged.
    """
    batch, evaluation = case
    leaves = {name: getattr(evaluation, name).clone().requires_grad_() for name in LEAVES}
    prepared = method.prepare(batch, method.initial_state())
    totals = method.totals(prepared)
    value, terms = torch.zeros((), dtype=torch.float64), {}
    splits = splits or [torch.arange(len(batch.group))]
    for rows in splits:
        part = prepared.select(rows)
        now = PolicyOutputs(**{name: leaf[rows] for name, leaf in leaves.items()})
        loss = method.loss(part, now, method.totals(part) if local else totals, method.initial_state())
        value = value + loss.value / (len(splits) if local else 1)
        for key, term in loss.terms.items():
            terms[key] = terms.get(key, 0.0) + term.item()
    value.backward()
    gradients = {name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for name, leaf in leaves.items()}
    return value.item(), terms, gradients, prepared


def assert_same(a, b, rows=slice(None), columns=slice(None), tolerance: float = 1e-12) -> None:
    """b's rows and columns carry a's result."""
    assert a[0] == pytest.approx(b[0], abs=tolerance, rel=1e-11)
    assert a[1] == pytest.approx(b[1], abs=tolerance, rel=1e-11)
    for name in LEAVES:
        torch.testing.assert_close(a[2][name], b[2][name][rows][:, columns], rtol=1e-11, atol=tolerance)


def reshaped(case: Case, change) -> Case:
    """The case with `change` applied to every [N,T] tensor."""
    batch, evaluation = case
    two = {f.name: getattr(batch, f.name) for f in fields(batch)}
    two = {k: change(v) for k, v in two.items() if isinstance(v, torch.Tensor) and v.dim() == 2 and k != "parts"}
    return replace(batch, **two), PolicyOutputs(**{name: change(getattr(evaluation, name)) for name in LEAVES})


@methods
@few
@given(seed=seeds, width=st.integers(1, 4), at=st.integers(0, 5))
def test_padding_and_observations_anywhere_change_nothing(method: PolicyGradient, seed: int, width: int, at: int) -> None:
    def widen(x: torch.Tensor) -> torch.Tensor:
        filler = torch.full((len(x), width), False if x.dtype == torch.bool else float("nan"), dtype=x.dtype)
        return torch.cat([x[:, :at], filler, x[:, at:]], dim=1)

    case = random_case(seed)
    wide = run(method, reshaped(case, widen))
    kept = [t for t in range(5 + width) if not at <= t < at + width]
    assert_same(run(method, case), wide, columns=kept)
    for name in LEAVES:
        assert not wide[2][name][:, at : at + width].any()


@methods
@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), -float("inf"), 1e30])
def test_values_at_masked_steps_have_no_influence_at_all(method: PolicyGradient, garbage: float) -> None:
    case = random_case(11)
    batch = case[0]

    def spoil(x: torch.Tensor) -> torch.Tensor:
        return x if x.dtype == torch.bool else torch.where(batch.mask, x, garbage)

    clean, spoilt = run(method, case), run(method, reshaped(case, spoil))
    assert clean[0] == spoilt[0] and clean[1] == spoilt[1]
    for name in LEAVES:
        assert torch.equal(clean[2][name], spoilt[2][name])


@methods
def test_control_a_value_at_a_chosen_step_does_matter(method: PolicyGradient) -> None:
    batch, evaluation = random_case(11)
    row = int(method.prepare(batch, method.initial_state()).needs_gradient.nonzero()[0])
    logp = evaluation.logp.clone()
    logp[row, 0] -= 0.01
    moved = run(method, (batch, replace(evaluation, logp=logp)))
    still = run(method, (batch, evaluation))
    assert moved[0] != still[0] or moved[1] != still[1]


@methods
@few
@given(seed=seeds)
def test_rows_may_come_in_any_order(method: PolicyGradient, seed: int) -> None:
    batch, evaluation = case = random_case(seed)
    if method.psi is METHODS["raft"].psi:  # the earlier of equal rewards is kept, so there order is meant to count
        batch = replace(batch, reward=batch.reward + torch.arange(8.0, dtype=torch.float64)[:, None] / 7)
        case = (batch, evaluation)
    order = torch.randperm(8, generator=torch.Generator().manual_seed(seed))
    shuffled = (batch.select(order), PolicyOutputs(**{name: getattr(evaluation, name)[order] for name in LEAVES}))
    assert_same(run(method, case), run(method, shuffled), rows=order.argsort())


@methods
@few
@given(seed=seeds, labels=st.permutations([-5, 0, 3, 10**12]))
def test_groups_may_have_any_numbers(method: PolicyGradient, seed: int, labels: list[int]) -> None:
    batch, evaluation = random_case(seed)
    relabelled = replace(batch, group=torch.tensor(labels)[batch.group])
    assert_same(run(method, (batch, evaluation)), run(method, (relabelled, evaluation)))


def test_control_merging_two_groups_changes_the_advantage() -> None:
    batch, _ = random_case(1)
    merged = replace(batch, group=batch.group.clamp(max=1))
    assert not torch.allclose(group_mean()(batch), group_mean()(merged))


@methods
@few
@given(seed=seeds, pieces=st.integers(2, 4))
def test_any_split_into_micro_batches_gives_the_same_gradient(method: PolicyGradient, seed: int, pieces: int) -> None:
    case = random_case(seed)
    order = torch.randperm(8, generator=torch.Generator().manual_seed(seed))
    assert_same(run(method, case), run(method, case, list(order.tensor_split(pieces))))


@pytest.mark.parametrize("method", [METHODS["dapo"], METHODS["grpo"], METHODS["everything"]], ids=["dapo", "grpo", "everything"])
def test_control_averaging_micro_batches_normalised_by_their_own_counts_is_wrong(method: PolicyGradient) -> None:
    case = random_case(2)
    right, wrong = run(method, case), run(method, case, [torch.arange(3), torch.arange(3, 8)], local=True)
    assert (right[2]["logp"] - wrong[2]["logp"]).abs().max() > 1e-3


@methods
@few
@given(seed=seeds)
def test_empty_rows_count_nowhere(method: PolicyGradient, seed: int) -> None:
    batch, evaluation = random_case(seed)

    def longer(x: torch.Tensor | None) -> torch.Tensor | None:
        if x is None:
            return None
        filler = (
            torch.full((2, *x.shape[1:]), float("nan")).to(x.dtype)
            if x.is_floating_point()
            else torch.zeros(2, *x.shape[1:], dtype=x.dtype)
        )
        return torch.cat([x, filler])

    grown = Batch(**{f.name: longer(getattr(batch, f.name)) for f in fields(batch) 
                     if f.name not in ("inputs", "last_value", "part_weights")}, part_weights=batch.part_weights,
                  last_value=torch.cat([batch.last_value, torch.zeros(2, dtype=torch.float64)]))  # fmt: skip
    now = PolicyOutputs(**{name: longer(getattr(evaluation, name)) for name in LEAVES})
    assert_same(run(method, (batch, evaluation)), run(method, (grown, now)), rows=slice(0, 8))
    a, b = (method.prepare(x, method.initial_state()) for x in (batch, grown))
    assert a.metrics == pytest.approx(b.metrics)


@methods
def test_a_batch_without_chosen_steps_gives_loss_and_gradient_zero(method: PolicyGradient) -> None:
    batch, evaluation = random_case(3)
    value, terms, gradients, _ = run(method, (replace(batch, mask=torch.zeros_like(batch.mask)), evaluation))
    assert value == 0.0 and all(term == 0.0 for term in terms.values())
    assert all(not gradient.any() for gradient in gradients.values())


@methods
@few
@given(seed=seeds)
def test_rows_that_need_no_gradient_have_none_and_leave_loss_and_metrics_alone(method: PolicyGradient, seed: int) -> None:
    case = random_case(seed)
    full = run(method, case)
    needed = full[3].needs_gradient
    for name in LEAVES:
        assert torch.equal(full[2][name][~needed], torch.zeros_like(full[2][name][~needed]))
    skipped = run(method, case, [needed.nonzero().flatten()])
    for name in LEAVES:
        torch.testing.assert_close(full[2][name], skipped[2][name], rtol=0, atol=1e-14)
    assert full[0] == pytest.approx(skipped[0], abs=1e-12) and full[1] == pytest.approx(skipped[1], abs=1e-12)


def test_a_group_of_equal_rewards_needs_no_forward_pass_unless_another_term_does() -> None:
    batch, _ = random_case(0)
    silent = batch.group == 2
    assert not METHODS["dr_grpo"].prepare(batch, {}).needs_gradient[silent].any()
    for loud in (GRPO, replace(METHODS["dr_grpo"], entropy=bonus(0.1)), replace(METHODS["dr_grpo"], surrogate=lambda p, r, a: p)):
        assert loud.prepare(batch, {}).needs_gradient.all()
    assert not replace(GRPO, kl=KL("loss", "k3", 0.0)).prepare(batch, {}).needs_gradient[silent].any()


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=9), st.floats(-50, 50), st.floats(0.1, 20))
def test_leave_one_out_and_group_standardisation(rewards: list[float], shift: float, scale: float) -> None:
    def batch_of(values: torch.Tensor) -> Batch:
        n = len(values)
        return Batch(torch.ones(n, 1, dtype=torch.bool), values[:, None], torch.zeros(n, 1), torch.zeros(n).long())

    r = torch.tensor(rewards, dtype=torch.float64)
    k = len(r)
    torch.testing.assert_close(leave_one_out(batch_of(r))[:, 0], k / (k - 1) * (r - r.mean()), rtol=1e-9, atol=1e-9)
    by_hand = [x - (sum(rewards) - x) / (k - 1) for x in rewards]
    assert leave_one_out(batch_of(r))[:, 0].tolist() == pytest.approx(by_hand, abs=1e-9)
    if r.max() - r.min() > 1e-3:
        standard = group_mean(eps=0.0)
        torch.testing.assert_close(standard(batch_of(scale * r + shift)), standard(batch_of(r)), rtol=1e-6, atol=1e-6)
        assert not torch.allclose(group_mean(std=False)(batch_of(2 * r)), group_mean(std=False)(batch_of(r)))


def test_metrics_are_means_over_the_steps_of_rows_that_need_a_gradient() -> None:
    batch, evaluation = random_case(0)
    _, terms, _, prepared = run(METHODS["dr_grpo"], (batch, evaluation))
    counted = batch.mask & (batch.group != 2)[:, None]
    assert torch.equal(prepared.needs_gradient, batch.group != 2)
    assert terms["entropy"] == pytest.approx(evaluation.entropy[counted].mean().item())


def test_filters_see_the_rewards_without_the_kl_penalty() -> None:
    batch, _ = random_case(0)
    prepared = replace(METHODS["rloo"], keep=(has_signal,)).prepare(batch, {})
    assert prepared.keep.tolist() == (batch.group != 2).tolist()
    assert prepared.advantage[batch.group == 2].any(), "the penalty makes the shaped rewards of that group unequal"


def test_inputs_follow_their_rows() -> None:
    batch, _ = random_case(0)
    rows = torch.tensor([5, 2])
    assert batch.select(rows).inputs == [5, 2]
    assert batch.select(torch.arange(8) > 5).inputs == [6, 7]
    nested = replace(batch, inputs={"ids": torch.arange(8), "names": tuple("abcdefgh")}).select(rows).inputs
    assert nested["ids"].tolist() == [5, 2] and nested["names"] == ["f", "c"]
    assert batch.select(slice(2, 4)).inputs == [2, 3]


def test_a_batch_is_a_detached_copy() -> None:
    parameter = torch.zeros(1, 2, requires_grad=True)
    batch = Batch(torch.ones(1, 2, dtype=torch.bool), torch.zeros(1, 2), parameter, torch.zeros(1).long())
    with torch.no_grad():
        parameter += 1
    assert batch.logp_old.tolist() == [[0.0, 0.0]] and not batch.logp_old.requires_grad


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_half_precision_log_probs_are_summed_in_float32(half: torch.dtype) -> None:
    """The log-ratio of a completion is that of the same rounded log-probs held in float32."""
    n, t, g = 8, 512, torch.Generator().manual_seed(0)
    logp, old = ((-torch.rand(n, t, generator=g)).to(half) for _ in range(2))
    reward = torch.arange(n).float()[:, None] * torch.eye(1, t)
    mask, group = torch.ones(n, t, dtype=torch.bool), torch.arange(n) // 4
    method = PolicyGradient(group_mean(), ratio.trajectory, unclipped, sequence_mean)

    def loss(logp: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
        prepared = method.prepare(Batch(mask, reward, old, group), {})
        return method.loss(prepared, PolicyOutputs(logp), method.totals(prepared), {}).value

    assert loss(logp, old).dtype == torch.float32
    assert float(loss(logp, old)) == float(loss(logp.float(), old.float()))
    halves, singles = (logp - old).float().sum(), (logp.float() - old.float()).sum()
    assert float(halves) != pytest.approx(float(singles), abs=1e-4), "negative control: half precision rounds each step"


@pytest.mark.parametrize("low_precision_clip", [clip(0.2, 0.2)])
def test_an_overflowing_ratio_at_a_zero_advantage_is_not_nan(low_precision_clip: clip) -> None:
    logp = torch.tensor([[500.0]], requires_grad=True)
    loss = low_precision_clip(logp, logp, torch.zeros(1, 1))
    loss.sum().backward()
    assert loss.item() == 0.0 and logp.grad.item() == 0.0


def test_the_gap_of_a_batch_without_steps_is_0():
    method = replace(resolve("reinforce"), kl=None, keep=())
    batch = Batch(
        torch.zeros(1, 0, dtype=torch.bool),
        torch.zeros(1, 0),
        torch.zeros(1, 0),
        torch.tensor([0]),
        logp_sampler=torch.zeros(1, 0),
    )
    metrics = method.prepare(batch, method.initial_state()).metrics
    assert metrics["sampling/sampling_logp_difference/max"] == 0.0


INF = float("inf")


def test_log_probs_of_half_precision_do_not_round_the_weights():
    """Seven steps of −A·log π = 1 with weight 1/7: 1. In bfloat16 1/7 is 0.142578, and the sum 0.998."""
    method = replace(resolve("reinforce_reward_to_go"), aggregate=resolve("dapo").aggregate)
    one = outcomes([1.0], 7)
    prepared = method.prepare(one, {})
    logp = torch.full((1, 7), -1.0, dtype=torch.bfloat16)
    loss = method.loss(prepared, PolicyOutputs(logp), method.totals(prepared), {})
    assert loss.value.dtype == torch.float32 and loss.value.item() == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("name", catalog.METHODS)
def test_a_step_that_has_become_impossible_gives_finite_numbers(name):
    """log π is −∞ now and was −1: ρ = 0, and 0·∞ would be no number, in value or gradient."""
    method = resolve({"preset": "pass_at_k", "psi": {"k": 2}} if name == "pass_at_k" else name)
    steps = torch.full((4, 3), -1.0)
    parts = torch.tensor([[1.0, 0.0], [0.0, 0.0], [0.0, 1.0], [0.25, 0.0]])
    known = {"logp_old": steps, "logp_ref": steps - 0.1, "logp_sampler": steps, "entropy": -steps, "parts": parts}
    known |= {"value": 0.1 * steps, "action_value": 0.1 * steps, "truncated": torch.zeros(4, dtype=torch.bool)}
    one = outcomes([1.0, 0.0, 1.0, 0.25], 3, **known)
    state = method.initial_state()
    prepared = method.prepare(one, state)
    logp = (steps + 0.01 * torch.arange(12).view(4, 3)).masked_fill(torch.arange(12).view(4, 3) % 5 == 1, -INF).requires_grad_()
    outputs = PolicyOutputs(logp, -steps, 0.1 * steps, 0.1 * steps)
    loss = method.loss(prepared, outputs, method.totals(prepared), prepared.state)
    assert all(map(math.isfinite, [loss.value.item(), *(float(term) for term in loss.terms.values())]))
    if loss.value.requires_grad:
        loss.value.backward()
        assert bool(logp.grad.isfinite().all())


def test_negative_control_an_impossible_step_without_the_bound(monkeypatch):
    monkeypatch.setattr("psigrad.objective.policy_gradient.LEAST_LOGP", -INF)
    with pytest.raises(AssertionError):
        test_a_step_that_has_become_impossible_gives_finite_numbers("cispo")


def test_a_reference_that_nobody_reads_may_be_infinite():
    rows = outcomes([1.0, 0.0], logp_ref=torch.tensor([[-INF, -1.0], [-1.0, -1.0]]))
    for where, estimator in (("loss", "k3"), ("reward", "k1")):
        unread = replace(resolve("grpo"), kl=KL(where, estimator, 0.0))
        assert bool(unread.prepare(rows, {}).advantage.isfinite().all())
        with pytest.raises(ValueError, match="logp_ref of rows"):  # negative control
            read = replace(resolve("grpo"), kl=KL(where, estimator, 0.1))
            read.prepare(rows, read.initial_state())


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


def test_a_divergence_over_the_vocabulary_is_needed_where_its_weight_is_not_0():
    assert (DISTILL.kl.coefficient, DISTILL.needs_exact_kl, GRPO.needs_exact_kl) == (1.0, True, False)
    for coefficient in (0.5, 0.0):
        method = replace(DISTILL, kl=KL("loss", "exact", coefficient))
        assert method.needs_exact_kl is method.needs_reference is bool(coefficient)
