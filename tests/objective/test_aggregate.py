"""Filters of rows and of single steps, and steps that a surrogate marks."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from edge_batches import batch

from psigrad.config.algorithms import resolve
from psigrad.errors import UserError
from psigrad.objective import Batch, PolicyOutputs, terminal
from psigrad.objective.parts.aggregate import clip_covariance, not_truncated, token_mean, top_entropy
from psigrad.objective.parts.ratio import KL
from psigrad.objective.parts.surrogate import clip, covariance_penalty, with_imitation


def rows(seed: int = 0, n: int = 4, t: int = 6) -> Batch:
    g = torch.Generator().manual_seed(seed)
    mask = torch.arange(t) < torch.randint(2, t + 1, (n,), generator=g)[:, None]
    logp, entropy = -3 * torch.rand(n, t, generator=g), torch.rand(n, t, generator=g)
    score = torch.randn(n, generator=g)
    return Batch(mask, terminal(score, mask), logp, torch.arange(n) // 2, entropy=entropy, logp_ref=logp - 0.1)


def gradient(method, batch: Batch) -> torch.Tensor:
    leaf = batch.logp_old.clone().requires_grad_()
    prepared = method.prepare(batch, method.initial_state())
    method.loss(prepared, PolicyOutputs(leaf), method.totals(prepared), prepared.state).value.backward()
    return leaf.grad


def test_steps_that_are_left_out_count_in_the_totals_and_in_the_kl_term():
    batch = rows()
    method = replace(resolve("dapo"), keep=())
    filtered = replace(method, keep=(top_entropy(0.4),))
    kept = top_entropy(0.4)(batch)
    assert 0 < int(kept.sum()) < int(batch.mask.sum())
    assert filtered.totals(filtered.prepare(batch, {})) == method.totals(method.prepare(batch, {}))
    assert torch.equal(gradient(filtered, batch), gradient(method, batch) * kept)
    pulled = KL("loss", "k3", 1.0)
    pull = gradient(replace(method, kl=pulled), batch) - gradient(method, batch)
    torch.testing.assert_close(gradient(replace(filtered, kl=pulled), batch), gradient(filtered, batch) + pull)
    share = filtered.prepare(batch, {}).metrics["frac_kept_steps"]
    assert share == pytest.approx(int(kept.sum()) / int(batch.mask.sum()))


def test_a_row_must_pass_the_filters_of_rows_and_a_step_those_of_steps():
    batch = replace(rows(), truncated=torch.tensor([True, False, False, False]))
    method = replace(resolve("dapo"), keep=(not_truncated, top_entropy(0.4), lambda b: b.mask & (b.entropy > 0.5)))
    prepared = method.prepare(batch, {})
    assert prepared.keep.tolist() == [False, True, True, True]
    assert torch.equal(prepared.counts, top_entropy(0.4)(batch) & (batch.entropy > 0.5))
    assert not gradient(method, batch)[0].any() and gradient(method, batch).any()


def test_a_row_of_which_no_step_counts_needs_no_forward_pass():
    batch = rows()
    entropy = batch.entropy.clone()
    entropy[2] = 0.0
    method = replace(resolve("dapo"), keep=(top_entropy(0.2),))
    assert method.prepare(replace(batch, entropy=entropy), {}).needs_gradient.tolist()[2] is False
    loud = replace(method, kl=KL("loss", "k3", 0.1))
    assert loud.prepare(replace(batch, entropy=entropy), {}).needs_gradient.all()


def test_all_tokens_alike_are_all_kept():
    batch = rows()
    flat = replace(batch, entropy=torch.full_like(batch.entropy, 0.7))
    assert torch.equal(top_entropy(0.2)(flat), batch.mask)
    with pytest.raises(ValueError, match="no `entropy`"):
        top_entropy()(replace(batch, entropy=None))


def test_covariance_chooses_among_the_steps_in_bounds_as_often_as_asked():
    batch, advantage = rows(n=64, t=32), None
    advantage = torch.randn(64, 1, generator=torch.Generator().manual_seed(1)).expand(64, 32) * batch.mask
    tokens = int(batch.mask.sum())
    means = [x[batch.mask].mean() for x in (batch.logp_old, advantage)]
    cost = (batch.logp_old - means[0]) * (advantage - means[1])
    within = (cost > 0.2) & (cost < 1.0) & batch.mask
    for share in (0.01, 0.05, 1e-6):
        left_out = batch.mask & ~clip_covariance(share, 0.2, 1.0)(batch, advantage)
        assert int(left_out.sum()) == max(int(share * tokens), 1) and not (left_out & ~within).any()
    everything = batch.mask & ~clip_covariance(0.99, 0.2, 1.0)(batch, advantage)
    assert torch.equal(everything, within)
    nothing = clip_covariance(0.99, 50.0, 60.0)(batch, advantage)
    assert torch.equal(nothing, batch.mask)


def test_the_draw_among_them_is_even_and_the_same_for_the_same_batch():
    """Over many batches every place of the candidates is drawn equally often."""
    counts = torch.zeros(40)
    mask, advantage = torch.ones(40, 1, dtype=torch.bool), torch.tensor([[1.0], [-1.0]]).repeat(20, 1)
    part = clip_covariance(0.05, -1e9, 1e9)
    for seed in range(2000):
        logp = -torch.rand(40, 1, generator=torch.Generator().manual_seed(seed))
        batch = Batch(mask, torch.zeros(40, 1), logp, torch.zeros(40).long())
        left_out = ~part(batch, advantage)
        assert torch.equal(left_out, ~part(batch, advantage)) and int(left_out.sum()) == 2
        counts += left_out[:, 0]
    assert abs(float(((counts - 100) ** 2 / 100).sum()) - 39) < 4 * math.sqrt(2 * 39), "χ² with 39 degrees of freedom"


def test_the_penalty_is_on_the_steps_of_greatest_covariance_wherever_the_micro_batches_end():
    batch = rows(n=8, t=12)
    method = replace(resolve("kl_cov"), surrogate=covariance_penalty(0.1, 2.0))
    prepared = method.prepare(batch, {})
    cost = (batch.logp_old - batch.logp_old[batch.mask].mean()) * (prepared.advantage - prepared.advantage[batch.mask].mean())
    count = int(0.1 * int(batch.mask.sum()))
    bound = cost[batch.mask].sort(descending=True).values[count - 1]
    assert torch.equal(prepared.marks, batch.mask & (cost >= bound)) and int(prepared.marks.sum()) == count
    moved = batch.logp_old - 0.05
    with_it, without = (
        float(m.loss(p, PolicyOutputs(moved), m.totals(p), {}).value)
        for m, p in ((method, prepared), (replace(method, surrogate=covariance_penalty(0.1, 1e-9)), prepared))
    )
    assert with_it - without == pytest.approx(2.0 * 0.05 * count / int(batch.mask.sum()), rel=1e-4)


def test_right_answers_are_imitated_by_the_mean_of_their_steps_wherever_the_micro_batches_end():
    batch = replace(rows(n=8, t=12), metric=torch.tensor([1.0, 0.9, 2.0, 0.0, 0.0, 1.0, 0.0, 0.0]))
    method = replace(resolve("grpo"), kl=None, aggregate=token_mean, surrogate=with_imitation(clip(), 0.3))
    prepared, alone = method.prepare(batch, {}), replace(method, surrogate=clip())
    moved = batch.logp_old - 0.05
    total = method.totals(prepared)
    parts = [method.loss(prepared.select(slice(i, i + 3)), PolicyOutputs(moved[i : i + 3]), total, {}).value for i in (0, 3, 6)]
    right = batch.mask & torch.tensor([1, 0, 1, 0, 0, 1, 0, 0]).bool()[:, None]
    without = alone.loss(alone.prepare(batch, {}), PolicyOutputs(moved), total, {}).value
    assert float(sum(parts) - without) == pytest.approx(-0.3 * float(moved[right].mean()), rel=1e-4)
    assert bool(prepared.needs_gradient[5]), "a right answer teaches, whatever its advantage"
    nothing = method.prepare(replace(batch, metric=torch.zeros(8)), {})
    assert not nothing.marks.any()


@pytest.mark.parametrize(
    ("part", "settings", "message"),
    [
        (top_entropy, {"share": 0.0}, "top_entropy has share=0.0"),
        (clip_covariance, {"low": 5.0}, "low < high"),
        (clip_covariance, {"share": 1.0}, "0 < share < 1"),
        (covariance_penalty, {"coefficient": 0.0}, "coefficient"),
        (with_imitation, {"coefficient": 0.0}, "expected more than 0"),
        (with_imitation, {"surrogate": covariance_penalty()}, "has a KL target, or needs inputs that the outer"),
        (KL, {"estimator": "exact_js", "mixture": 1.0}, "for 0 use exact_forward, for 1 exact"),
        (KL, {"where": "reward", "estimator": "exact_forward"}, "expected k1, k2 or k3, not importance-weighted"),
    ],
)
def test_parameters_that_cannot_be_are_refused(part, settings, message):
    with pytest.raises(ValueError, match=message):
        part(**settings)


def test_parts_come_by_their_names():
    named = resolve({"preset": "dapo", "keep": ["has_signal", {"part": "top_entropy", "share": 0.3}, "clip_covariance"]})
    assert named.keep[1:] == (top_entropy(0.3), clip_covariance()) and named.needs_old_entropy
    assert resolve({"preset": "grpo", "surrogate": {"part": "covariance_penalty", "share": 0.1}}).surrogate == covariance_penalty(
        0.1
    )
    assert not resolve({"preset": "grpo", "psi": "no_reward"}).needs_reward
    with pytest.raises(UserError, match="did you mean 'top_entropy'"):
        resolve({"preset": "dapo", "keep": ["top_entrpy"]})


def test_dynamic_sampling_looks_at_the_metric_where_there_is_one():
    reward = [1.0, 1.0, 1.0, 0.6, 1.0, 0.0, 0.0, 0.0]  # the first group is right throughout, and one was long
    rows = batch(reward, torch.zeros(8, 2), group=[0] * 4 + [1] * 4)
    correct = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0])
    method = replace(resolve("dapo"), keep=resolve("dapo").keep[:1])
    assert method.prepare(rows, {}).keep.tolist() == [True] * 8
    assert method.prepare(replace(rows, metric=correct), {}).keep.tolist() == [False] * 4 + [True] * 4
