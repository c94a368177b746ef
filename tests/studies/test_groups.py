"""Expected steps over every group that can be drawn, against slow loops, closed forms and finite differences."""

from __future__ import annotations

import itertools
import math
import statistics

import numpy as np
import pytest

from psigrad.errors import UserError
from psigrad.tabular import all_paths, softmax_policy
from studies import groups, rewards
from studies.claims import difficulty, length
from studies.settings import LengthSettings

LONGEST, SIZE = 3, 3
THETA = np.random.default_rng(0).normal(size=(2 * LONGEST, 2))


def by_loops(*, std: bool, by_length: bool) -> np.ndarray:
    """The expected step of GRPO's family, one ordered group after the other, from the formula of the paper."""
    policy = softmax_policy(THETA, 1.0)
    paths, p = all_paths(groups.fork(LONGEST), policy)
    score, reward, length = [], paths.rewards.sum(1), paths.lengths
    for states, actions, n in zip(paths.states, paths.actions, length, strict=True):
        one = np.zeros_like(THETA)
        for s, a in zip(states[:n], actions[:n], strict=True):
            one[s] += (np.arange(2) == a) - policy[s]
        score.append(one.ravel())
    total = np.zeros(THETA.size)
    for group in itertools.product(range(len(p)), repeat=SIZE):
        rewards = [float(reward[i]) for i in group]
        scale = statistics.stdev(rewards) + 1e-4 if std else 1.0
        for i, r in zip(group, rewards, strict=True):
            advantage = 0.0 if len(set(rewards)) == 1 else (r - statistics.fmean(rewards)) / scale
            total += math.prod(p[list(group)]) * advantage / (length[i] if by_length else 1024) / SIZE * score[i]
    return total


@pytest.mark.parametrize(
    ("name", "std", "by_length"), [("GRPO", True, True), ("GRPO without std", False, True), ("Dr. GRPO", False, False)]
)
def test_the_expected_step_is_that_of_a_slow_loop(name, std, by_length):
    found = groups.enumerate_groups(groups.METHODS[name], LONGEST, THETA, SIZE).gradient
    assert found == pytest.approx(by_loops(std=std, by_length=by_length), rel=1e-9, abs=1e-15)


def test_negative_control_the_loop_tells_the_methods_apart():
    found = groups.enumerate_groups(groups.METHODS["GRPO"], LONGEST, THETA, SIZE).gradient
    assert found != pytest.approx(by_loops(std=False, by_length=True), rel=1e-2)
    assert found != pytest.approx(by_loops(std=True, by_length=False), rel=1e-2)


def test_dr_grpo_is_the_exact_gradient_times_a_number_and_grpo_is_not():
    _, slope = groups.accuracy(LONGEST, THETA)
    expected = {name: groups.enumerate_groups(method, LONGEST, THETA, SIZE).gradient for name, method in groups.METHODS.items()}
    assert expected["Dr. GRPO"] == pytest.approx((1 - 1 / SIZE) / 1024 * slope, rel=1e-9, abs=1e-18)
    for name in ("GRPO", "GRPO without std"):
        along = expected[name] @ slope / (slope @ slope) * slope
        assert np.linalg.norm(expected[name] - along) > 0.05 * np.linalg.norm(along)


@pytest.mark.parametrize("right", [True, False])
def test_the_slope_of_the_mean_length_is_that_of_finite_differences(right):
    _, slope = groups.mean_length(LONGEST, THETA, right=right)
    for i in range(THETA.size):
        step = np.zeros(THETA.size)
        step[i] = 1e-5
        up, down = (groups.mean_length(LONGEST, THETA + sign * step.reshape(THETA.shape), right=right)[0] for sign in (1, -1))
        assert slope[i] == pytest.approx((up - down) / 2e-5, abs=1e-8)


def test_a_token_of_a_wrong_answer_weighs_less_the_longer_it_is_under_grpo_alone():
    rows = {name: length.climb(name, 4) for name in groups.METHODS}
    assert rows["GRPO"].weight == pytest.approx({2: 1.0, 3: 2 / 3, 4: 1 / 2})
    assert rows["Dr. GRPO"].weight == pytest.approx({2: 1.0, 3: 1.0, 4: 1.0})
    assert rows["GRPO"].wrong > 0.1 and rows["GRPO"].right < -0.1 and rows["Dr. GRPO"].wrong == pytest.approx(0, abs=1e-12)
    assert [round(accuracy, 2) for accuracy, _ in rows["Dr. GRPO"].path][:3] == [0.3, 0.32, 0.34]
    assert rows["GRPO"].path[-1][1] > rows["GRPO"].path[0][1] and rows["GRPO"].path[-1][0] >= length.GOAL


def test_the_weight_of_a_prompt_is_that_of_the_binomial_formula():
    size = 8

    def weight(p: float) -> float:
        terms = 0.0
        for k in range(1, size):
            deviation = math.sqrt(k * (size - k) / size / (size - 1)) + 1e-4
            terms += math.comb(size, k) * p**k * (1 - p) ** (size - k) * k * (size - k) / size**2 / deviation
        return terms / (p * (1 - p))

    found = difficulty.weigh("GRPO", size).weight
    assert found == pytest.approx([weight(p) / weight(0.5) for p in difficulty.CHANCES])
    assert difficulty.weigh("Dr. GRPO", size).weight == pytest.approx([1.0] * len(difficulty.CHANCES))


def test_shares_of_the_weight_by_hand():
    rows = [{"step": 1, "row": 7, "reward": r, "advantage": a} for r, a in ((1.0, 1.5), (0.0, -0.5), (0.0, -0.5), (0.0, -0.5))]
    rows += [{"step": 2, "row": 7, "reward": r, "advantage": a} for r, a in ((1.0, 0.5), (1.0, 0.5), (0.0, -0.5), (0.0, -0.5))]
    rows += [{"step": 2, "row": 8, "reward": 1.0, "advantage": 0.0} for _ in range(4)]
    assert difficulty.shares(rows, 4) == pytest.approx([3 / 5, 2 / 5, 0])
    assert all(math.isnan(x) for x in difficulty.shares(rows[-4:], 4)), "nothing was learnt from"


def test_lengths_of_wrong_and_right_answers_by_hand():
    rows = [{"step": step, "reward": r, "completion_ids": [0] * n} for step, r, n in ((1, 0, 4), (5, 0, 6), (5, 1, 3), (6, 0, 9))]
    assert length.lengths(rows) == [{"step": 5, "right": 3.0}, {"step": 5, "wrong": 5.0}, {"step": 10, "wrong": 9.0}]


def test_a_remark_says_whether_the_answer_is_right_and_is_as_long_in_either_case():
    assert rewards.answered([" tac!..", " tca?", "tac.", "tac tac!"], ["tac"] * 4) == [1.0, 0.0, 1.0, 0.0]
    right, wrong = ([length.remark(i, mark) for i in range(2000)] for mark in (True, False))
    assert [len(text) for text in right] == [len(text) for text in wrong]
    assert {text[0] for text in wrong} == {"?"} and set("".join(wrong)[1:]) <= set("?-")
    assert statistics.fmean(len(text) - 1 for text in right) == pytest.approx(2.9, abs=0.2)
    assert max(map(len, right)) == 1 + length.MOST


@pytest.mark.parametrize("longest", [2, 9])
def test_a_tree_that_cannot_be_enumerated_is_refused(longest):
    with pytest.raises(UserError, match=f"longest is {longest}; expected 3 to 8 tokens"):
        length.check(LengthSettings(longest=longest))
