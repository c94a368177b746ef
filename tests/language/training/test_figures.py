"""What rollouts.jsonl says of tokens is what the update saw, and saying it changes nothing."""

from __future__ import annotations

import math

import pytest
import torch
from in_memory import advance, log_of, make

from psigrad.language.models.packing import Groups
from psigrad.language.rollout.collectors import round_all
from psigrad.language.rollout.types import State
from psigrad.language.training.loss_sums import LossSums
from psigrad.language.training.online import online_rl as training
from psigrad.language.training.online.annotators.old_log_probs import LogProbGap
from psigrad.language.training.online.figures import TokenFigures
from psigrad.objective import Batch, PolicyOutputs, Prepared


def lines(tokenizer, algorithm="grpo", **settings):
    run = make(tokenizer, algorithm, **settings)
    before = {(r.index): r.ids for r in run.prompts}
    policy = run.model.frozen_copy()
    advance(run, State(algorithm=run.algorithm.initial_state()))
    return run, policy, before, log_of(run).lines


def own_logp(model, prompt, row):
    inputs = Groups([prompt], [[tuple(row["completion_ids"])]])
    return model.evaluate(inputs, temperature=1.0).logp[0].tolist()


def test_log_probs_are_the_policys_own(tokenizer):
    _, policy, prompts, rows = lines(tokenizer, num_iterations=2)
    shown = [row for row in rows if "logprobs" in row]
    assert len(shown) == 16 and any("trained_logprobs" in row for row in shown)
    for row in shown:
        exact = own_logp(policy, prompts[row["row"]], row)
        assert row["logprobs"] == pytest.approx(exact, abs=2e-4)
        assert len(row["logprobs"]) == len(row["completion_ids"])
    moved = [row for row in shown if "trained_logprobs" in row]
    difference = max(abs(a - b) for row in moved for a, b in zip(row["logprobs"], row["trained_logprobs"], strict=True))
    assert difference > 1e-3  # the second pass sees the policy after the first step


def test_in_a_single_pass_the_trained_policy_is_the_one_that_sampled(tokenizer):
    _, _, _, rows = lines(tokenizer)
    for row in rows:
        if "trained_logprobs" in row:
            assert row["trained_logprobs"] == pytest.approx(row["logprobs"], abs=2e-4)


def test_reference_and_advantages_by_token(tokenizer):
    _, _, _, rows = lines(tokenizer, {"preset": "grpo", "kl": {"where": "loss", "estimator": "k3", "coefficient": 0.04}})
    assert all(row["ref_logprobs"] == pytest.approx(row["logprobs"], abs=2e-4) for row in rows)
    assert not any("advantages" in row for row in rows)
    _, _, _, rows = lines(tokenizer, {"preset": "ppo", "psi": {"psi": {"lam": 0.9}}})  # lam 1 gives all tokens one
    varying = [row for row in rows if "advantages" in row]
    assert varying
    for row in varying:
        assert math.fsum(row["advantages"]) / len(row["advantages"]) == pytest.approx(row["advantage"], abs=2e-4)


def test_only_the_first_prompts_are_written_by_token_and_none_where_none_is_wanted(tokenizer):
    _, _, _, rows = lines(tokenizer, record_tokens=1)
    assert [("logprobs" in row) for row in rows] == [True] * 4 + [False] * 12
    _, _, _, rows = lines(tokenizer, record_tokens=0)
    assert not any({"logprobs", "trained_logprobs", "entropy", "advantages"} & row.keys() for row in rows)


def test_what_is_written_changes_nothing_of_what_is_learned(tokenizer):
    def learned(count):
        run, *_ = lines(tokenizer, record_tokens=count, num_iterations=2)
        return torch.cat([p.detach().flatten() for p in run.model.trainable().values()]), log_of(run).rows

    (some, figures), (none, same) = learned(4), learned(0)
    assert torch.equal(some, none) and figures == same


def test_the_share_of_tokens_whose_bits_differ_is_of_those_that_were_compared():
    """By hand: of three chosen tokens two differ, by 0.25 and by 0.5; the fourth place is padding, where anything may stand."""
    zeros = torch.zeros(2, 2)
    batch = Batch(
        mask=torch.tensor([[True, True], [True, False]]), reward=zeros, logp_old=zeros - 1, group=torch.zeros(2, dtype=torch.long)
    )
    gap = LogProbGap()
    gap.add(torch.tensor([[-1.0, -1.25], [-0.5, 7.0]]), batch.logp_old, batch.mask)
    name = "sampling/sampling_logp_difference/"
    found = {key.removeprefix(name): value for key, value in gap.figures().items() if key.startswith(name)}
    assert found == {"mean": pytest.approx(0.75 / 3), "max": 0.5, "share": pytest.approx(2 / 3)}


def test_people_read_four_digits_of_a_figure_of_a_token():
    assert round_all([0.123456, -2, 1e-5]) == [0.1235, -2.0, 0.0]


def test_a_pass_that_counts_nowhere_goes_through_every_output_with_gradient_0():
    """Of log-probs and values; entropies are without a gradient here, and are left out."""
    logp, value = torch.tensor([[1.0, 2.0]], requires_grad=True), torch.tensor([[3.0, -1.0]], requires_grad=True)
    loss = training.zero_loss(PolicyOutputs(2 * logp, torch.ones(1, 2), value**2))
    loss.backward()
    assert loss.item() == 0.0 and logp.grad.tolist() == value.grad.tolist() == [[0.0, 0.0]]


def test_a_row_without_chosen_tokens_has_no_figures_of_tokens():
    """Of two rows the policy chose the second token of the first and nothing of the other."""
    mask = torch.tensor([[False, True, False], [False, False, False]])
    batch = Batch(mask, torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(2).long())
    prepared = Prepared(batch, torch.zeros(2, 3), torch.tensor([True, False]), torch.ones(2).bool(), {}, {})
    seen = TokenFigures(2, prepared)
    sums = LossSums()
    seen.store(torch.tensor([0, 1]), PolicyOutputs(torch.full((2, 3), -0.5)), sums)
    sums.end_step(None)
    assert seen.rows() == [{"trained_logprobs": [0.0, -0.5]}, {"kept": False}]
