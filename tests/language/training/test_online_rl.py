"""The gradient half of an online step on a real (tiny) model: what it must not depend on, and when it must do nothing."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch
from in_memory import advance, log_of, make, with_sampler, with_scorer
from inline_scorer import InlineScorer

from psigrad.config import Optim
from psigrad.config.algorithms import resolve
from psigrad.errors import UserError
from psigrad.language.models import tiny
from psigrad.language.models.language_model import LanguageModel, Lora, prepare
from psigrad.language.recipes import online_settings
from psigrad.language.rewards import resolve as reward
from psigrad.language.rollout.samplers.embedded import EmbeddedSampler
from psigrad.language.rollout.types import SamplingParams, State
from psigrad.language.training.online import online_rl as training
from psigrad.language.training.online.annotators.old_log_probs import LogProbGap
from psigrad.language.training.online.batching import rows_of, to_batch
from psigrad.language.training.online.collect import collect, group_scored
from psigrad.language.training.online.online_run import OnlineRun
from psigrad.objective.catalog import METHODS as PRESETS
from psigrad.objective.parts.advantage import group_mean
from psigrad.objective.parts.off_policy import off_policy_mask
from psigrad.objective.parts.surrogate import clip
from psigrad.optim.optimizer import check_gradients
from psigrad.step import Clock

ONLINE = [n for n in PRESETS if n not in ("reinforce_total_return", "reinforce_reward_to_go")]
# groups of four have no signal for the default of one right answer among four
SPECS = [pytest.param({"preset": "pass_at_k", "psi": {"k": 2, "right": 0.2}} if n == "pass_at_k" else n, id=n) for n in ONLINE]


def weights(model: LanguageModel) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.trainable().values()]).clone()


def after(run: OnlineRun, steps: int = 1) -> torch.Tensor:
    state = State(algorithm=run.algorithm.initial_state())
    for _ in range(steps):
        state = advance(run, state)
    return weights(run.model)


def far(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max())


def test_the_weights_of_rewards_reach_the_algorithm(tokenizer):
    """GDPO by two functions of which one has weight 0 is GDPO by the other."""

    def one(completions, **columns):
        return [float(len(text)) for text in completions]

    def other(completions, **columns):
        return [float(len(text) % 3) for text in completions]

    def learnt(functions, weights) -> torch.Tensor:
        run = make(tokenizer, "gdpo")
        run = replace(with_scorer(run, InlineScorer([reward(f) for f in functions])), reward_weights=weights)
        return after(run)

    alone = learnt([one], {})
    assert torch.equal(learnt([one, other], {"other": 0.0}), alone)
    assert not torch.equal(learnt([one, other], {}), alone)


@pytest.mark.parametrize("algorithm", SPECS)
def test_any_split_into_micro_batches_gives_the_same_gradient(algorithm, tokenizer):
    def gradient(budget: int) -> torch.Tensor:
        run = make(tokenizer, algorithm, micro_batch_tokens=budget, optim=Optim(learning_rate=0.0, max_grad_norm=0))
        after(run)
        return torch.cat([p.grad.flatten() for p in run.model.trainable().values()])

    whole = gradient(1 << 20)
    assert float(whole.abs().max()) > 1e-5
    for budget in (10, 33, 70):
        assert far(gradient(budget), whole) < 1e-5 * float(whole.abs().max())


def test_negative_control_totals_of_each_micro_batch_give_another_gradient(tokenizer, monkeypatch):
    def gradient(budget: int) -> torch.Tensor:
        run = make(tokenizer, "grpo", micro_batch_tokens=budget, optim=Optim(learning_rate=0.0, max_grad_norm=0))
        after(run)
        return torch.cat([p.grad.flatten() for p in run.model.trainable().values()])

    whole = gradient(1 << 20)
    original = training.Passes.losses
    monkeypatch.setattr(
        training.Passes,
        "losses",
        lambda self, micros, totals: (
            loss
            for micro, counts in micros
            for loss in original(self, [(micro, counts)], self.algorithm.totals(self.prepared, rows_of(micro)))
        ),
    )
    assert far(gradient(33), whole) > 1e-2 * float(whole.abs().max())


def test_rows_without_gradient_skip_the_forward_pass_and_change_nothing(tokenizer, monkeypatch):
    """With beta = 0 a group of equal rewards adds nothing: leaving it out is exact."""

    def some_equal(completions, prompts, **columns):
        return [1.0 if p == "say a:" or len(c) % 2 else 0.0 for c, p in zip(completions, prompts, strict=True)]

    def run_counting(skip: bool):
        # what is kept from sampling would be compared with a few completions more
        run = make(tokenizer, {"preset": "grpo", "kl": None}, function=some_equal, prompts_per_step=8, keep_activations_gb=0.0)
        if not skip:
            original = type(run.algorithm).prepare

            def all_rows(*args):
                prepared = original(*args)
                return replace(prepared, needs_gradient=torch.ones_like(prepared.needs_gradient))

            monkeypatch.setattr(type(run.algorithm), "prepare", all_rows)
        seen, evaluate = [], LanguageModel.evaluate
        monkeypatch.setattr(LanguageModel, "evaluate", lambda *given, **k: seen.append(given[1]) or evaluate(*given, **k))
        moved = after(run)
        monkeypatch.undo()
        return moved, sum(len(cs) for inputs in seen for cs in inputs.completions)

    skipped, few = run_counting(True)
    full, many = run_counting(False)
    assert few < many == 32
    assert far(skipped, full) < 1e-6


def test_a_step_without_signal_moves_the_weights_by_the_momentum_of_adamw(tokenizer, monkeypatch):
    """One step of gradient g, then one of gradient 0, by Adam's formula."""
    seen = []

    def once(completions, **columns):
        seen.append(completions)
        return [0.0] * len(completions) if len(seen) > 4 else [float(i % 2) for i in range(len(completions))]

    run = make(
        tokenizer, {"preset": "grpo", "kl": None}, function=once, optim=Optim(learning_rate=1e-2, lr_scheduler_type="constant")
    )
    state = advance(run, State(algorithm=run.algorithm.initial_state()))
    first, moments = weights(run.model), run.optimizer.weights.values()
    m, v = (torch.cat([w.state[key].flatten() for w in moments]).double() for key in ("exp_avg", "exp_avg_sq"))
    advance(run, state)
    expected = first - 1e-2 * (0.9 * m / (1 - 0.9**2)) / ((0.999 * v / (1 - 0.999**2)).sqrt() + run.config.optim.adam_epsilon)
    row = log_of(run).rows[-1]
    assert row["grad_norm"] == 0.0 and row["updates"] == 1 and row["frac_reward_zero_std"] == 1.0
    assert far(weights(run.model), expected) < 1e-7 < 1e-3 < far(weights(run.model), first)


def test_on_fresh_samples_the_ratio_is_one_and_the_gap_is_rounding(tokenizer):
    run = make(tokenizer, "grpo")
    after(run)
    row = log_of(run).rows[-1]
    assert row["clip_ratio/region_mean"] == 0.0 and row["policy/approxkl_avg"] == 0.0
    assert row["sampling/sampling_logp_difference/max"] < 1e-5


def test_a_sampler_that_is_not_the_policy_stops_the_run(tokenizer):
    run = make(tokenizer, "grpo")
    other = tiny.model("qwen3", len(tokenizer), hidden=32, layers=1, heads=2, max_length=64, seed=9)
    strange = with_sampler(run, EmbeddedSampler(prepare(other, tokenizer)))
    with pytest.raises(UserError, match="At step 1 the log-probs of sampler and trainer differ by"):
        after(strange)


def test_a_single_pass_masks_what_the_policy_has_left_since_it_was_sampled(tokenizer, monkeypatch):
    """0.4 nats a token are within the mask's 0.5, 0.6 are not: then completions below their group's mean teach nothing."""

    def fell(nats: float, surrogate, *keep) -> torch.Tensor:
        def stale(*given):
            batch = to_batch(*given)
            return replace(batch, logp_sampler=batch.logp_old + nats)

        monkeypatch.setattr(training, "to_batch", stale)
        return after(make(tokenizer, replace(resolve("grpo"), kl=None, surrogate=surrogate, keep=keep)))

    def above(batch):
        return batch.mask & (group_mean()(batch) >= 0)

    assert torch.equal(fell(0.4, off_policy_mask()), fell(0.0, clip()))
    left = fell(0.6, off_policy_mask())
    assert far(left, fell(0.6, clip(), above)) < 1e-6 and far(left, fell(0.6, clip())) > 1e-4


@pytest.mark.parametrize(("iterations", "minibatches"), [(3, 1), (1, 2), (2, 2)])
def test_several_passes_clip_against_the_policy_that_sampled(iterations, minibatches, tokenizer):
    run = make(tokenizer, "grpo", num_iterations=iterations, num_minibatches=minibatches, optim=Optim(learning_rate=3e-2))
    after(run)
    row = log_of(run).rows[-1]
    assert row["updates"] == iterations * minibatches
    assert row["policy/approxkl_avg"] > 1e-5 and row["clip_ratio/region_mean"] > 0


def test_an_optimiser_step_takes_whole_groups(tokenizer, monkeypatch):
    run, seen, original = make(tokenizer, num_minibatches=3), [], training.assign_micro_batches
    monkeypatch.setattr(training, "assign_micro_batches", lambda *given: seen.append(given[2]) or original(*given))
    after(run)
    assert len(seen) == 3 and torch.equal(torch.stack(seen).sum(0), torch.ones(16, dtype=torch.long))
    assert all(len(set(part.view(4, 4)[g].tolist())) == 1 for part in seen for g in range(4))


def equal(completions, **columns):
    return [0.1] * len(completions)


@pytest.mark.parametrize("algorithm", [{"preset": "grpo", "kl": None}, "dr_grpo", "dapo", "gspo", "cispo"])
def test_groups_of_equal_rewards_have_a_gradient_of_0(algorithm, tokenizer):
    run = make(tokenizer, algorithm, function=equal)
    before = weights(run.model)
    assert torch.equal(after(run, 2), before)
    row = log_of(run).rows[-1]
    assert row["grad_norm"] == 0.0 if row["groups"] else "grad_norm" not in row, "DAPO drops such groups"
    assert row["frac_reward_zero_std"] == 1.0
    assert not any(isinstance(v, float) and math.isnan(v) for v in row.values())


def test_truncated_completions_teach_dapo_nothing(tokenizer):
    run = make(tokenizer, "dapo")
    run = replace(run, params=SamplingParams(max_tokens=1))
    before = weights(run.model)
    moved = after(run)
    ended = [line["finish_reason"] for line in log_of(run).lines]
    assert "length" in ended
    if "stop" not in ended:
        assert torch.equal(moved, before)


def test_a_group_of_one_is_refused(tokenizer):
    config = make(tokenizer, "grpo", num_generations=1, reward=("exact",)).config
    with pytest.raises(UserError, match="num_generations is 1, but grpo compares completions of one prompt; give at least 2"):
        online_settings.check(config, resolve("grpo"))


def test_unscored_completions_leave_the_batch_and_many_stop_the_run(tokenizer):
    def failing(share: float):
        def function(completions, completion_ids, **columns):
            if len(completions) > 1:
                raise RuntimeError("one at a time")
            if random.Random(str(completion_ids)).random() < share:
                raise RuntimeError("the judge is out")
            return [float(len(completions[0]))]

        return function

    run = make(tokenizer, "grpo", function=failing(0.2), max_unscored=0.6)
    after(run)
    row = log_of(run).rows[-1]
    assert 0 < row["unscored"] < 10 and row["updates"] == 1
    lines = [line for line in log_of(run).lines if line["status"] == "unscored"]
    assert len(lines) == row["unscored"]
    assert all(line["reward"] is None and "the judge is out" in line["reason"] for line in lines)
    with pytest.raises(UserError, match=r"of 16 completions stayed unscored, above max_unscored 0; most often .*judge is out"):
        after(make(tokenizer, "grpo", function=failing(0.5), max_unscored=0.0))


@pytest.mark.parametrize("method", ["grpo", "dr_grpo", "rloo", "dapo", "gdpo", "reinforce_pp", "opo", "process_grpo", "ppo"])
@pytest.mark.parametrize(
    ("rewards", "precision", "centred", "std"),
    [
        ([1e6, 1e6 + 0.001, 1e6, 1e6], torch.float64, [-0.00025, 0.00075, -0.00025, -0.00025], 0.0005),
        ([1e20, 0.0, -1e20, 0.0], torch.float64, [1e20, 0.0, -1e20, 0.0], 1e20 * (2 / 3) ** 0.5),
        ([0.7, 0.1, 0.1, 0.1], torch.float32, [0.45, -0.15, -0.15, -0.15], 0.3),
        ([1e6, 1e6, 1e6, 1e6], torch.float32, [0.0, 0.0, 0.0, 0.0], 0.0),
    ],
)
def test_close_and_large_rewards_reach_the_advantage(method, rewards, precision, centred, std, tokenizer):
    run = make(tokenizer, method)
    (group, *_) = group_scored(collect(run, 0, 0, Clock()).trajectories, 4, 2)
    group = [replace(t, reward=r, parts={"only": r}) for t, r in zip(group, rewards, strict=True)]
    batch = to_batch([group])
    assert {batch.reward.dtype, batch.metric.dtype, batch.parts.dtype} == {precision}
    needed = {"logp_ref": batch.logp_old, "truncated": torch.zeros(4, dtype=torch.bool), "value": torch.zeros(batch.mask.shape)}
    prepared = run.algorithm.prepare(replace(batch, **needed), run.algorithm.initial_state())
    assert prepared.keep.tolist() == [method != "dapo" or std > 0] * 4
    assert prepared.advantage.dtype == torch.float32 and (prepared.returns is None or prepared.returns.dtype == torch.float32)
    found = prepared.advantage[:, 0].tolist()
    scale = {"grpo": 1 / (std + 1e-4), "dapo": 1 / (std + 1e-4), "dr_grpo": 1.0, "rloo": 4 / 3}.get(method)
    assert scale is None or found == pytest.approx([x * scale for x in centred], rel=1e-4)
    assert all(map(math.isfinite, found))


@pytest.mark.parametrize("algorithm", ["grpo", "rloo", {"preset": "grpo", "kl": {"estimator": "exact"}}], ids=str)
def test_lora_is_its_own_reference_in_training(algorithm, tokenizer):
    run = make(tokenizer, algorithm, lora=Lora(4), micro_batch_tokens=40)
    base = {n: p.detach().clone() for n, p in run.model.network.named_parameters() if not p.requires_grad}
    after(run, 2)
    assert all(torch.equal(p, base[n]) for n, p in run.model.network.named_parameters() if n in base)
    first, second = log_of(run).rows
    key = "kl" if "kl" in first else "objective/kl"
    assert abs(first[key]) < 1e-6 < abs(second[key])


def test_bfloat16_trains_with_its_ratio_at_one(tokenizer):
    run = make(tokenizer, "grpo", dtype=torch.bfloat16)
    moved = after(run, 2)
    assert all(row["clip_ratio/region_mean"] == 0.0 and row["updates"] == 1 for row in log_of(run).rows)
    assert float((moved - weights(make(tokenizer, dtype=torch.bfloat16).model)).abs().max()) > 1e-3


def test_a_gradient_that_is_not_finite_is_a_logged_no_op(tokenizer, monkeypatch):
    run = make(tokenizer, "grpo")
    before = weights(run.model)
    original = LanguageModel.evaluate

    def poisoned(self, inputs, **settings):
        out = original(self, inputs, **settings)
        return replace(out, logp=out.logp * math.nan) if torch.is_grad_enabled() else out

    monkeypatch.setattr(LanguageModel, "evaluate", poisoned)
    monkeypatch.setattr(LogProbGap, "check", lambda *a: None)
    state = advance(run, State(algorithm=run.algorithm.initial_state()))
    assert torch.equal(weights(run.model), before)
    assert state.nonfinite == 1 and log_of(run).rows[-1]["updates"] == 0
    for _ in range(2):
        check_gradients(state.nonfinite, state.step)
        state = advance(run, state)
    with pytest.raises(UserError, match="not finite for 3 steps in a row"):
        check_gradients(state.nonfinite, state.step)
    assert torch.equal(weights(run.model), before)


def test_who_recomputes_activations_keeps_none(tokenizer):
    run = make(tokenizer)
    recomputing = replace(run, config=replace(run.config, model=replace(run.config.model, gradient_checkpointing=True)))
    for job, keeps in ((run, True), (recomputing, False)):
        assert (training.activation_cache(job) is not None) == keeps
