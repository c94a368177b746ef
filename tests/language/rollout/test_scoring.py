"""When completions that stayed without a reward stop a run."""

from __future__ import annotations

import contextlib

import pytest

from psigrad.language.rollout.scoring import RewardError, Samples, check_unscored, concatenate, turns_of


def reasons(unscored: int, total: int) -> list[str | None]:
    return ["late"] * unscored + [None] * (total - unscored)


@pytest.mark.parametrize(
    ("unscored", "total", "limit"),
    [(0, 10, 0.0), (7, 7, 0.1), (20, 24, 0.1), (20, 200, 0.1), (58, 200, 0.29), (300, 3000, 0.1), (9, 9, 1.0), (0, 0, 0.1)],
)
def test_up_to_the_limit_of_200_completions_a_run_goes_on(unscored, total, limit):
    assert check_unscored(reasons(unscored, total), limit) == [[unscored, total]]


@pytest.mark.parametrize(
    ("unscored", "total", "limit"), [(1, 10, 0.0), (8, 8, 0.99), (21, 24, 0.1), (21, 200, 0.1), (59, 200, 0.29), (301, 3000, 0.1)]
)
def test_above_the_limit_a_run_stops(unscored, total, limit):
    with pytest.raises(RewardError, match=f"^{unscored} of {total} completions stayed unscored"):
        check_unscored(reasons(unscored, total), limit)


@pytest.mark.parametrize(("each", "last"), [(3, 7), (2, None)])
def test_the_limit_is_judged_over_the_last_steps(each, last):
    """Of 24 completions a step 3 are 21 after seven steps; 2 are 18 in the nine steps that hold 200."""
    window, passed = [], 0
    with contextlib.suppress(RewardError):
        for _ in range(30):
            window = check_unscored(reasons(each, 24), 0.1, before=window)
            passed += 1
    assert (passed, len(window)) == ((last - 1, last - 1) if last else (30, 9))


def test_the_message_names_the_commonest_reason_and_its_rows():
    mixed = [None, "late", *["boom"] * 21]
    with pytest.raises(RewardError) as caught:
        check_unscored(mixed, 0.1, [f"t.csv:{2 + i // 4}" for i in range(23)], [[1, 30]])
    assert str(caught.value) == (
        "22 of 23 completions stayed unscored; 23 of the last 53, above max_unscored 0.1; most often (21, rows t.csv:2, t.csv:3, "
        "t.csv:4, t.csv:5, t.csv:6, …): boom. Fix the cause, or raise max_unscored."
    )


def test_samples_are_joined_with_the_columns_that_all_have():
    one, two = (Samples([p], [c], [[i]], {"answer": [p + c]}, prompt_ids=[[i, i]]) for i, (p, c) in enumerate(["ab", "cd"]))
    assert concatenate([one]) == one and concatenate([]) == Samples([], [], [])
    assert concatenate([one, two]) == Samples(
        ["a", "c"], ["b", "d"], [[0], [1]], {"answer": ["ab", "cd"]}, prompt_ids=[[0, 0], [1, 1]]
    )
    for other in (Samples(["e"], ["f"], [[2]], {"answer": ["ef"]}), Samples(["e"], ["f"], [[2]], {}, prompt_ids=[[2]])):
        with pytest.raises(ValueError, match="need the same columns"):
            concatenate([one, other])


def test_the_policys_turns_are_the_assistants_alone():
    said = [{"role": role, "content": role} for role in ("api", "assistant", "tool", "user", "assistant")]
    assert turns_of(said) == ["assistant", "assistant"] and turns_of("text") == ["text"]
