"""Online preferences: pairs of the best and the worst, and steps on them find the optimum."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from in_memory import advance, log_of, make, with_reference

from psigrad.config import Optim
from psigrad.config.algorithms import resolve_loss
from psigrad.language.rollout.types import SamplingParams, State
from psigrad.language.training.online.collect import collect
from psigrad.language.training.online.online_preferences import pick_pairs
from psigrad.objective.preferences.preference_loss import OnlinePreference
from psigrad.step import Clock


def preferring(tokenizer, loss="dpo", **settings):
    run = make(tokenizer, "grpo", **settings)
    return with_reference(replace(run, algorithm=OnlinePreference(resolve_loss(loss))), run.model.frozen_copy())


def begins_with_a_letter(completions, **columns):
    return [float(text[:1].isascii() and text[:1].islower()) for text in completions]


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long)])
def test_online_dpo_finds_the_optimum(seed, tokenizer):
    settings = {"prompts_per_step": 8, "num_generations": 8, "optim": Optim(learning_rate=1e-2), "steps": 80}
    run = preferring(tokenizer, function=begins_with_a_letter, seed=seed, **settings)
    run = replace(run, params=SamplingParams(max_tokens=6, stop_token_ids=tuple(range(132, 264))))
    state, shares = State(), []
    for _ in range(80):
        state = advance(run, state)
        shares.append(next(row["reward"] for row in log_of(run).rows if row["step"] == state.step))
    assert shares[0] < 0.4 and sum(shares[-5:]) / 5 > 0.9


def test_a_pair_is_the_best_and_the_worst_and_ties_say_nothing(tokenizer):
    run = preferring(tokenizer, steps=1)
    collected = collect(run, 0, 0, Clock())
    groups = [[replace(t, reward=r) for t, r in zip(g, (0.2, 0.9, 0.1, 0.9), strict=True)] for g in collected.groups[:2]]
    groups.append([replace(t, reward=0.5) for t in collected.groups[2]])
    found = pick_pairs(groups)
    assert found.chosen == [1, 5] and found.rejected == [2, 6] and found.rows == 12 and len(found.pairs) == 2
    assert found.pairs[0].chosen.ids == list(groups[0][1].completion.ids) and all(found.pairs[0].chosen.mask)


def test_a_step_of_equal_rewards_moves_no_weight(tokenizer):
    run = preferring(tokenizer, function=lambda completions, **c: [1.0] * len(completions), steps=1)
    before = [p.detach().clone() for p in run.model.trainable().values()]
    advance(run, State())
    assert all(torch.equal(a, b) for a, b in zip(before, run.model.trainable().values(), strict=True))
    assert log_of(run).rows[-1]["pairs"] == 0 and log_of(run).rows[-1]["updates"] == 0
