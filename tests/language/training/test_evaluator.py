"""Held-out figures by hand: means over prompts, pass@k of what was scored, each reward function; the same seeds at any step."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from in_memory import annotate, make

from psigrad.intervals import mean_interval, wilson
from psigrad.language.models import tiny
from psigrad.language.recipes.evaluator import Evaluator, describe_sensitivity, figures_of
from psigrad.language.rollout.types import Completion, Cut, Trajectory
from psigrad.language.training.loss_sums import LossSums
from psigrad.language.training.online.annotators.old_log_probs import compute_log_probs
from psigrad.language.training.online.annotators.reference import reference_log_probs
from psigrad.language.training.online.batching import to_batch
from psigrad.language.training.online.collect import penalise_truncated
from psigrad.language.training.online.figures import collection_metrics
from psigrad.objective import Loss


def completion(row, k, reward, finish="stop", **parts) -> Trajectory:
    own = Completion((5, 6), (-1.0, -1.0), (-1.0, -1.0), finish, k)
    return Trajectory(row, k, (1,), own, 0, reward=reward, parts=parts)


def test_pass_at_k_is_of_the_completions_that_were_scored():
    """Prompt 0 has 1 right of 4, prompt 1 of its two scored ones 1; the third prompt has no score and counts nowhere."""
    rewards = [1.0, 0.0, 0.0, 0.0, None, 1.0, 0.0, None, None, None, None, None]
    found = figures_of([completion(i // 4, i % 4, reward) for i, reward in enumerate(rewards)], 4, "exact")
    low, high = mean_interval([0.25, 0.5])
    assert (found["eval/exact/mean"], found["eval/exact/low"], found["eval/exact/high"]) == (0.375, low, high)
    assert (found["eval/prompts"], found["eval/unscored"]) == (3, 6)
    # of two: prompt 0 holds the right one in C(3,1) of C(4,2) pairs, prompt 1 in its only pair; of four: prompt 0 alone has them
    assert [found[f"eval/pass@{k}"] for k in (1, 2, 4)] == pytest.approx([0.375, (0.5 + 1.0) / 2, 1.0])


@pytest.mark.parametrize(
    ("right", "of", "said"),
    [
        # 2.8·√((0.16 + 0.2496)/100) = 0.1795 from 0.2, and 0.2 + 0.1795 has the variance 0.2355: 2.8·√(0.3955/100) = 0.176
        (20, 100, "100 held-out prompts reveal a gain in m of about 0.18 in four of five runs"),
        (0, 100, "100 held-out prompts reveal a gain in m of about 0.073 in"),
        (19, 20, "20 held-out prompts are too few to show even a rise of m to 1; raise eval_prompts"),
        (5, 9, "a verdict needs 10 scored held-out prompts, not 9; raise eval_prompts"),
    ],
)
def test_the_gain_that_an_evaluation_shows_is_said(right, of, said):
    assert said in describe_sensitivity([[1.0]] * right + [[0.0]] * (of - right), "m")


def test_each_of_several_reward_functions_has_its_held_out_figure():
    rows = [completion(0, 0, 1.2, right=1.0, short=0.2), completion(1, 0, 0.4, right=0.0, short=0.4), completion(2, 0, None)]
    rows.append(completion(3, 0, 1.0, right=1.0, short=None))
    found = figures_of(rows, 1, "reward")
    assert found["eval/reward/mean"] == pytest.approx(2.6 / 3)
    assert found["eval/rewards/right/mean"] == pytest.approx(2 / 3)
    assert (found["eval/rewards/right/low"], found["eval/rewards/right/high"]) == wilson(2, 3)
    assert found["eval/rewards/short/mean"] == pytest.approx(0.3)
    alone = figures_of([completion(0, 0, 1.0, right=1.0)], 1, "right")
    assert not any(key.startswith("eval/rewards/") for key in alone), "one function is the metric itself"


def test_two_evaluations_of_one_policy_draw_the_same():
    run = make(tiny.tokenizer(["say a: b"], 270))
    evaluator = Evaluator(run.prompts, None, "reward", run.params, seed=4, num_generations=2)
    (_, first), (_, later) = (evaluator(run.model, run.sampler, step) for step in (0, 7))
    assert [t.completion.ids for t in first] == [t.completion.ids for t in later] and len(
        {t.completion.seed for t in first}
    ) == 16


def test_the_penalty_for_no_end_is_taken_from_cut_completions_alone():
    cut, ended = completion(0, 0, 0.75, "length"), completion(0, 1, 0.75)
    assert (penalise_truncated(cut, 0.5).reward, penalise_truncated(cut, 0.5).parts) == (0.25, {"missing_eos": -0.5})
    assert (penalise_truncated(ended, 0.5).reward, penalise_truncated(ended, 0.5).parts) == (0.75, {"missing_eos": 0.0})
    assert penalise_truncated(replace(cut, reward=None), 0.5).reward is None


def test_figures_are_sums_over_micro_batches_and_means_over_optimiser_steps():
    """Losses 1 + 2 in the first step and 5 in the second: 4; gradient norms 2 and 4: 3."""
    tally = LossSums()
    for shares, norm in (((1.0, 2.0), 2.0), ((5.0,), 4.0)):
        for share in shares:
            tally.add(Loss(torch.tensor(share), {"kl": torch.tensor(share / 2)}))
        tally.end_step([norm])
    assert tally.figures() == {"loss": 4.0, "kl": 2.0, "updates": 2, "grad_norm": 3.0}


def test_the_spread_of_rewards_is_the_mean_over_groups_of_the_sample_deviation():
    """Groups (0, 1) and (0.5, 0.5): (1/√2 + 0) / 2, and half of them all alike. A single value has no spread."""
    rows = [completion(i // 2, i % 2, reward, own=reward) for i, reward in enumerate((0.0, 1.0, 0.5, 0.5))]
    found = collection_metrics(rows, 2)
    assert (found["reward"], found["frac_reward_zero_std"]) == (0.5, 0.5)
    assert found["reward_std"] == pytest.approx(0.5**1.5) and found["rewards/own/std"] == pytest.approx((0.5 / 3) ** 0.5)
    alone = collection_metrics(rows[:1], 1)
    assert (alone["reward_std"], alone["rewards/own/std"]) == (0.0, 0.0)


def test_the_surprise_of_filtered_draws_is_no_entropy():
    """p = (3/4, 1/4): drawn from p, −log p is ln 4/3 three times of four and ln 4 once, in the mean the entropy 0.562. Under
    top-k 1 the likelier token is all that is drawn: 0.288, which says nothing of the other.
    """
    likely, rare = math.log(3 / 4), math.log(1 / 4)
    free = [drawn(logp, logp) for logp in (likely, likely, likely, rare)]
    found = collection_metrics(free, 4)
    assert found["entropy"] == pytest.approx(0.5623, abs=1e-4) and "surprise" not in found
    found = collection_metrics([drawn(likely, 0.0)] * 4, 4)
    assert found["surprise"] == pytest.approx(0.2877, abs=1e-4) and "entropy" not in found


def drawn(logp, filtered):
    """A completion of one token."""
    made = completion(0, 0, 1.0)
    return replace(made, completion=replace(made.completion, ids=(5,), logprobs=(logp,), sampling_logprobs=(filtered,)))


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_what_is_computed_before_the_update_is_at_the_temperature_of_the_samples(temperature):
    """The reference's log-probs; and with several passes in bfloat16 the policy's own, in place of the sampler's."""
    run = make(tiny.tokenizer(["say a: b"], 270), {"preset": "grpo", "kl": {}}, num_iterations=2, dtype=torch.bfloat16)
    run = replace(run, params=replace(run.params, temperature=temperature))
    group = [[completion(0, k, 1.0) for k in range(2)]]
    batch = to_batch(group)
    found = annotate(run, batch)
    expected = [f(m, batch, 4096, temperature) for f, m in ((reference_log_probs, run.reference), (compute_log_probs, run.model))]
    assert torch.equal(found.logp_ref, expected[0]) and torch.equal(found.logp_old, expected[1])
    assert not torch.equal(found.logp_old, batch.logp_old)
    with torch.no_grad():
        other = reference_log_probs(run.reference, batch, 4096, 1.5 - temperature)
    assert not torch.allclose(found.logp_ref, other), "negative control: the temperature matters"


def test_every_figure_of_a_collection_by_hand():
    """Two groups of two: lengths 1 to 3, one cut; an episode of 3 turns whose policy chose 2 of 4 tokens; one that failed."""

    def row(k, tokens, finish="stop", **given):
        logp = (-0.5,) * tokens
        return Trajectory(k // 2, k, (1,), Completion((7,) * tokens, logp, logp, finish, k), 0, **given)

    said = (
        {"role": "tool", "content": "error: no such tool"},
        {"role": "tool", "content": "4"},
        {"role": "user", "content": "?"},
    )
    episode = row(3, 4, mask=(True, False, False, True), turns=3, messages=said, cuts=(Cut(1, "cut", ""),), status="unscored")
    rows = [
        row(0, 1, reward=1.0, status="scored", parts={"a": 1.0, "b": None}),
        row(1, 3, "length", reward=0.0, status="scored", parts={"a": 0.0, "b": 2.0}),
        row(2, 3, reward=0.5, status="failed", parts={"a": 0.5}),
        episode,
    ]
    expected = {
        "reward": 0.5,
        "reward_std": 0.5**0.5 / 2,
        "frac_reward_zero_std": 0.5,
        "rewards/a/mean": 0.5,
        "rewards/a/std": 0.5,
        "rewards/b/mean": 2.0,
        "rewards/b/std": 0.0,
        "completions/mean_length": 9 / 4,
        "completions/min_length": 1,
        "completions/max_length": 3,
        "completions/clipped_ratio": 1 / 4,
        "completions/mean_terminated_length": 6 / 3,
        "entropy": 0.5 * 11 / 9,
        "samples": 4,
        "failed": 1,
        "unscored": 1,
        "turns/mean": 6 / 4,
        "observations/cut": 1,
        "tools/call_frequency": 2 / 4,
        "tools/failure_frequency": 1 / 2,
    }
    assert collection_metrics(rows, 2) == {name: pytest.approx(value) for name, value in expected.items()}
    plain = collection_metrics(rows[:3], 3)
    assert not {"turns/mean", "observations/cut", "tools/call_frequency"} & plain.keys()
