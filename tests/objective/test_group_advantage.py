"""Advantages from parts of the reward and from rewards of steps, in groups."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from edge_batches import batch, outcomes, rows

from psigrad.config.algorithms import resolve
from psigrad.objective import Batch, terminal
from psigrad.objective.parts.group_advantage import (
    _choose_ratio,
    decoupled_group_mean,
    group_mean_batch_std,
    length_weighted_mean,
    pass_at_k,
    process_group_mean,
)


def test_rewards_of_other_kinds_are_standardised_apart():
    """(1, 0) and (0, 1) add up to the same, yet the rarer one is worth more."""
    parts = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 0.0]])
    mask = torch.ones(4, 2, dtype=torch.bool)
    batch = Batch(mask, terminal(parts.sum(1), mask), torch.zeros(4, 2), torch.zeros(4).long(), parts=parts)
    advantage = decoupled_group_mean()(batch)
    assert not resolve("grpo").prepare(replace(batch, logp_ref=torch.zeros(4, 2)), {}).advantage.any(), "the sums are all 1"
    assert not advantage.any(), "two parts that cancel exactly leave nothing"
    weighted = decoupled_group_mean()(replace(batch, part_weights=(1.0, 2.0)))
    assert weighted[1, 0] > 0 > weighted[0, 0] and torch.equal(weighted[:, 0], weighted[:, 1])
    assert float(weighted[:, 0].std()) == pytest.approx(1.0, abs=1e-3)


def test_a_reward_that_does_not_apply_adds_nothing_and_is_no_zero():
    nan = math.nan
    parts = torch.tensor([[1.0, nan], [0.0, nan], [1.0, 5.0], [0.0, 7.0]])
    mask = torch.ones(4, 1, dtype=torch.bool)
    batch = Batch(mask, torch.zeros(4, 1), torch.zeros(4, 1), torch.zeros(4).long(), parts=parts)
    first, second = 0.5 / math.sqrt(1 / 3), 1 / math.sqrt(2)
    sums = torch.tensor([first, -first, first - second, -first + second])
    torch.testing.assert_close(decoupled_group_mean(eps=0.0)(batch)[:, 0], sums / sums.std(), rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="no `parts`"):
        decoupled_group_mean()(replace(batch, parts=None))
    with pytest.raises(ValueError, match=r"parts has shape \(3, 2\); expected \[4, K\]"):
        replace(batch, parts=parts[:3])


def test_rewards_of_steps_are_standardised_over_the_group_and_summed_from_behind():
    """Shao et al. 2024, 4.1.3, by hand: six rewards of two completions."""
    mask = torch.tensor([[True] * 5, [True] * 4 + [False]])
    reward = torch.tensor([[1.0, 0.0, 0.0, 0.0, 0.5], [0.0, 2.0, 0.0, 0.0, 0.0]])
    rewarded = torch.tensor([[1, 0, 1, 0, 1], [0, 1, 1, 1, 0]]).bool()
    batch = Batch(mask, reward, torch.zeros(2, 5), torch.zeros(2).long(), rewarded=rewarded)
    six = torch.tensor([1.0, 0.0, 0.5, 2.0, 0.0, 0.0])
    scaled = ((six - six.mean()) / six.std()).tolist()
    first = [sum(scaled[:3]), scaled[1] + scaled[2], scaled[1] + scaled[2], scaled[2], scaled[2]]
    second = [sum(scaled[3:]), sum(scaled[3:]), scaled[4] + scaled[5], scaled[5], 0.0]
    torch.testing.assert_close(process_group_mean(eps=0.0)(batch), torch.tensor([first, second]), rtol=1e-5, atol=1e-6)
    found = process_group_mean(std=False)(batch)
    assert float(found[0, 4]) == pytest.approx(0.5 - float(six.mean()))
    # without `rewarded`: rewards that are not 0, and each row's last step
    guessed = process_group_mean(std=False)(replace(batch, rewarded=None))
    assert float(guessed[1, 3]) == pytest.approx(0.0 - (1 + 0.5 + 2 + 0) / 4)
    assert not process_group_mean()(replace(batch, mask=torch.zeros_like(mask))).any()


def test_pass_at_k_counts_what_is_above_the_threshold_alone():
    """0.5 is not right. Of 4 answers 1 is: C(3,2)/C(4,2) = 1/2 of the pairs fail, σ = 1/2; a right answer gets 1/2 / σ = 1, a
    wrong one (1/2 − C(2,1)/C(3,1)) / σ = −1/3.
    """
    advantage = pass_at_k(2)(outcomes([0.5, 0.5, 1.0, 0.0]))
    torch.testing.assert_close(advantage[:, 0], torch.tensor([-1 / 3, -1 / 3, 1.0, -1 / 3]))


def test_pass_at_k_takes_one_completion_more_than_k():
    """With k of them every choice is all of them: σ = 0, so a group that lost one to an unscored completion is left out."""
    assert (resolve("pass_at_k").min_group_size, replace(resolve("pass_at_k"), psi=pass_at_k(2)).min_group_size) == (5, 3)
    assert (resolve("grpo").min_group_size, resolve("reinforce").min_group_size) == (2, 1)
    from psigrad.config import OnlineConfig
    from psigrad.language.recipes.online_settings import check

    with pytest.raises(
        ValueError, match="num_generations is 4, but pass_at_k compares completions of one prompt; give at least 5"
    ):
        check(OnlineConfig(algorithm="pass_at_k", reward=("exact",), num_generations=4), resolve("pass_at_k"))


def test_more_are_drawn_than_there_are():
    counts = torch.tensor([0.0, 1.0, 3.0], dtype=torch.float64)
    assert _choose_ratio(counts, counts, 3).tolist() == [0.0, 0.0, 1.0]


def test_parts_are_divided_by_their_deviation_plus_eps():
    parts = torch.tensor([[1.0], [0.0], [0.0], [0.0]])
    batch = rows([[1]] * 4, parts=parts, part_weights=(1.0,))
    eps, centred = 0.5, parts[:, 0] - 0.25
    own = centred / (parts[:, 0].std() + eps)
    expected = own / (own.std() + eps)
    torch.testing.assert_close(decoupled_group_mean(eps=eps)(batch)[:, 0], expected)


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_pass_at_k_needs_one_more_than_k(k):
    """Of k alone nothing is learned: one of them is right, or none is."""
    method = resolve("pass_at_k")
    assert replace(method, psi=replace(method.psi, k=k)).min_group_size == k + 1


def test_advantages_of_groups_say_what_they_need():
    rows = batch([1.0, -1.0], [[0.0], [0.0]])
    with pytest.raises(ValueError, match="below 0"):
        resolve("maxrl").prepare(rows, {})
    with pytest.raises(ValueError, match="expected at least 5; sample more completions per prompt"):
        resolve("pass_at_k").prepare(rows, {})
    uneven = batch([0.0] * 7, torch.zeros(7, 1), group=[0] * 5 + [1] * 2)
    with pytest.raises(ValueError, match="k=4 and a group has 2 completions; lower k or sample more"):
        resolve("pass_at_k").prepare(uneven, {})


def test_the_standard_deviation_may_be_that_of_the_batch():
    rows = batch([1.0, 0.0, 9.0, 5.0], torch.zeros(4, 1), group=[0, 0, 1, 1])
    std = torch.tensor([1.0, 0.0, 9.0, 5.0]).std()
    expected = torch.tensor([0.5, -0.5, 2.0, -2.0]) / (std + 1e-4)
    torch.testing.assert_close(group_mean_batch_std()(rows)[:, 0], expected)


def test_a_group_without_steps_has_no_advantage():
    batch = rows([[1, 1], [0, 0]], group=[0, 1], reward=[[0.0, 1.0], [0.0, 0.0]])
    assert torch.equal(length_weighted_mean(batch), torch.zeros(2, 2))
