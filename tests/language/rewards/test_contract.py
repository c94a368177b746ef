"""What InlineScorer and RewardPool both promise, for every kind of function and of return."""

from __future__ import annotations

import inspect
import itertools
import json
from math import inf, nan

import pytest
from cases import slow
from inline_scorer import InlineScorer

from psigrad.errors import UserError
from psigrad.language.rewards import Failed, Failure, RewardSpec, Scored, Unscored, check_unscored
from psigrad.language.rewards.reward_pool import combine
from psigrad.language.rollout.types import Completion, Trajectory
from psigrad.language.training.online.figures import collection_metrics

ONES = ("list", "tuple", "ints", "bools", "fraction", "array", "array int", "array bool", "numpy scalars")
ONES = (*ONES, "tensor", "tensor on graph", "tensor scalars")
# What else can come back, and a word of the reason.
MALFORMED = {
    "nan": "returned nan",
    "inf": "returned inf",
    "huge int": "returned inf",
    "complex": "complex",
    "decimal": "Decimal",
    "strings": "str",
    "lists": "list",
    "array column": "list",
    "numpy vectors": "ndarray",
    "tensor rows": "Tensor",
    "none": "returned None",
    "float": "float",
    "string": "str",
    "bytes": "bytes",
    "dict": "dict",
    "set": "set",
    "generator": "generator",
    "array scalar": "ndarray",
}


@pytest.fixture(scope="module", params=["inline", "pool"])
def kinds(request, zoo):
    """One scorer of each sort for the whole table, because its worker imports torch."""
    from psigrad.language.rewards import RewardPool

    specs = {name: zoo(name) for name in ("of_kind", "of_kind_async")}
    if request.param == "inline":
        yield {name: InlineScorer([spec]) for name, spec in specs.items()}
        return
    pools = {name: RewardPool([spec], timeout=60.0) for name, spec in specs.items()}
    yield pools
    for pool in pools.values():
        pool.close()


def test_a_column_that_a_function_needs_and_the_rows_lack_is_named_beside_those_there_are(score):
    def exact(completions, answer, extra=0):
        raise AssertionError

    results = score(InlineScorer([RewardSpec("exact", exact)]), ["a", "b"], solution=["a", "b"], level=[1, 2])
    said = "exact needs the column 'answer', which the dataset does not have (found: solution, level)"
    assert [result.reason for result in results] == [said, said]
    near = score(InlineScorer([RewardSpec("exact", exact)]), ["a"], anwser=["a"])
    assert near[0].reason.endswith("(found: anwser; did you mean 'anwser'?)"), "the nearest of all that there is"


@pytest.mark.parametrize("name", ["of_kind", "of_kind_async"])
@pytest.mark.parametrize("kind", ONES)
def test_numbers_of_every_kind_are_rewards(kinds, name, kind, score):
    results = score(kinds[name], ["a"] * 3, kind=[kind] * 3)
    assert results == [Scored(1.0, {name: 1.0})] * 3
    assert all(type(r.value) is float and type(r.parts[name]) is float for r in results)


@pytest.mark.parametrize("name", ["of_kind", "of_kind_async"])
@pytest.mark.parametrize("kind", MALFORMED)
def test_what_is_no_reward_is_unscored_with_its_kind(kinds, name, kind, score):
    for result in score(kinds[name], ["a"] * 3, kind=[kind] * 3):
        assert isinstance(result, Unscored)
        assert name in result.reason and MALFORMED[kind] in result.reason


@pytest.mark.parametrize(("kind", "returned"), [("short", 2), ("long", 4), ("empty", 0)])
def test_a_wrong_number_of_rewards_is_unscored_and_not_asked_for_again(kinds, kind, returned, score):
    results = score(kinds["of_kind"], ["a"] * 3, kind=[kind] * 3)
    assert results == [Unscored(f"of_kind returned {returned} rewards for 3 completions")] * 3


def test_nothing_but_none_is_unscored_and_neither_zero_nor_a_fault(kinds, score):
    for result in score(kinds["of_kind"], ["a"] * 3, kind=["nones"] * 3):
        assert isinstance(result, Unscored) and "no reward function applies" in result.reason
        assert check_unscored([result.reason] * 300, 0.0) == [[0, 300]]


def test_order_is_that_of_the_completions(scorer_of, zoo, score):
    texts = ["x" * n for n in (5, 0, 3, 9, 1, 1, 2)]
    assert [r.value for r in score(scorer_of(zoo("length")), texts, size=2)] == [5, 0, 3, 9, 1, 1, 2]


def test_no_completions_give_no_results(scorer_of, zoo, score):
    assert score(scorer_of(zoo("length")), []) == []


def test_a_group_is_shown_together_and_only_a_group(scorer_of, zoo, score):
    scorer = scorer_of(zoo("rank_in_group"))
    texts = ["b", "a", "d", "c"]
    assert [r.value for r in score(scorer, texts, size=4)] == [1, 0, 3, 2]
    assert [r.value for r in score(scorer, texts, size=2)] == [1, 0, 1, 0]
    assert [r.value for r in score(scorer, texts, size=1)] == [0, 0, 0, 0]


def test_functions_get_the_arguments_they_name(scorer_of, zoo, score):
    scorer = scorer_of(zoo("columns_only"), zoo("positional_default"))
    results = score(scorer, ["a", "b"], answer=["question", "other"], unused=[1, 2])
    assert [r.parts for r in results] == [
        {"columns_only": 1.0, "positional_default": 2.0},
        {"columns_only": 0.0, "positional_default": 2.0},
    ]


def test_a_missing_column_is_named_in_the_reason(scorer_of, zoo, score):
    (result,) = score(scorer_of(zoo("columns_only")), ["a"])
    assert result == Unscored("columns_only needs the column 'answer', which the dataset does not have (found: only prompts)")


BAD = ["raise", "sys.exit", "unprintable", "long", "surrogate", "recursion", "memory"]


@pytest.mark.parametrize(
    ("name", "bad"), [*itertools.product(["act"], BAD), ("act_async", "raise"), *slow(*itertools.product(["act_async"], BAD[1:]))]
)
def test_one_bad_sample_does_not_take_its_group_along(scorer_of, zoo, score, name, bad):
    results = score(scorer_of(zoo(name)), ["ok", bad, "half", "ok"])
    assert [r.value for r in results if isinstance(r, Scored)] == [1.0, 0.5, 1.0]
    assert isinstance(results[1], Unscored) and results[1].reason.startswith(f"{name} raised ")
    assert len(results[1].reason) < 600
    json.dumps(results[1].reason)


@pytest.mark.parametrize("share", [1, 30, 100])
def test_failures_are_counted_sample_by_sample(scorer_of, zoo, score, share):
    texts = ["raise" if i % 100 < share else "ok" for i in range(100)]
    results = score(scorer_of(zoo("act")), texts, size=8)
    assert [isinstance(r, Unscored) for r in results] == [t == "raise" for t in texts]
    assert {r.reason for r in results if isinstance(r, Unscored)} == {"act raised ValueError: boom (zoo.py, line 34)"}


@pytest.mark.parametrize("how", ["fail", "failure", "fussy", "fussy value"])
@pytest.mark.parametrize("size", [1, 4])
def test_a_failure_is_the_policys_and_only_that_samples(scorer_of, zoo, score, how, size):
    scorer = scorer_of(zoo("act"), failure_value=-1.0)
    results = score(scorer, ["ok", how, "none", "half"], size=size)
    assert results[0] == Scored(1.0, {"act": 1.0}) and results[3].value == 0.5
    reason = "act: no answer" if "fussy" in how else "act: no answer tag"
    assert results[1] == Failed(-1.0, reason, {"act": -1.0})
    assert isinstance(results[2], Unscored)


def test_weights_multiply_and_none_is_left_out(scorer_of, zoo, score):
    scorer = scorer_of(zoo("act"), zoo("length"), weights=(2.0, -0.25))
    results = score(scorer, ["half", "none"])
    assert results == [Scored(2 * 0.5 - 0.25 * 4, {"act": 0.5, "length": 4.0}), Scored(-1.0, {"act": None, "length": 4.0})]


def test_a_weight_of_zero_only_measures(scorer_of, zoo, score):
    scorer = scorer_of(zoo("act"), zoo("length"), weights=(1.0, 0.0))
    results = score(scorer, ["ok", "none"])
    assert results[0] == Scored(1.0, {"act": 1.0, "length": 2.0})
    assert isinstance(results[1], Unscored), "0 would be a reward that nobody gave"


def test_a_failure_leaves_what_the_other_functions_gave(scorer_of, zoo, score):
    """By hand: 0.5·7 + 2·(−1) = 1.5; the audit's A14: a wrong program beside `format` is worth what `format` gave."""
    (result,) = score(scorer_of(zoo("length"), zoo("act")), ["failure"])
    assert result == Failed(7.0, "act: no answer tag", {"length": 7.0, "act": 0.0})
    (result,) = score(scorer_of(zoo("length"), zoo("act"), weights=(0.5, 2.0), failure_value=-1.0), ["failure"])
    assert result == Failed(1.5, "act: no answer tag", {"length": 7.0, "act": -1.0})
    (result,) = score(scorer_of(zoo("length"), zoo("act"), weights=(1.0, 0.0)), ["failure"])
    assert result == Scored(7.0, {"length": 7.0, "act": 0.0}), "a function that only measures fails nothing"


def test_functions_of_one_name_are_told_apart(scorer_of, zoo, score):
    scorer = scorer_of(zoo("length"), zoo("act"), zoo("length"), RewardSpec("length_2", zoo("length").function))
    assert [spec.name for spec in scorer.specs] == ["length", "act", "length_2", "length_2_2"]
    (result,) = score(scorer, ["ok"])
    assert result == Scored(7.0, {"length": 2.0, "act": 1.0, "length_2": 2.0, "length_2_2": 2.0})


def test_a_sum_beyond_floating_point_is_unscored(scorer_of, score):
    def vast(completions, **columns):
        return [1.5e308] * len(completions)

    (result,) = score(scorer_of(RewardSpec("a", vast), RewardSpec("b", vast)), ["x"])
    assert isinstance(result, Unscored) and "rewards is beyond 1e+150 (" in result.reason


@pytest.mark.parametrize("text", ["\ud800", "a\0b", "\u202eevil", "x" * 1_000_000, "", "\U0001f600", "</s><|im_end|>"])
def test_any_text_gets_through(scorer_of, zoo, score, text):
    (result,) = score(scorer_of(zoo("length")), [text], note=[text])
    assert result.value == len(text)


def test_conversations_and_columns_get_through(scorer_of, score):
    def check(prompts, completions, completion_ids, metadata, **columns):
        return [
            float(c[0]["content"] == "hi" and m == {"a": [1, None]} and i == [1] and p == "question")
            for p, c, i, m in zip(prompts, completions, completion_ids, metadata, strict=True)
        ]

    (result,) = score(
        scorer_of(RewardSpec("check", check)), [[{"role": "assistant", "content": "hi"}]], metadata=[{"a": [1, None]}]
    )
    assert result.value == 1.0


@pytest.mark.parametrize("weights", [(1.0,), (1.0, 2.0, 3.0)])
def test_as_many_weights_as_functions_or_none(scorer_of, zoo, weights):
    with pytest.raises(UserError, match=f"{len(weights)} reward_weights for 2 reward functions"):
        scorer_of(zoo("length"), zoo("act"), weights=weights)


@pytest.mark.parametrize("weight", [nan, inf])
def test_weights_are_finite(scorer_of, zoo, weight):
    with pytest.raises(UserError, match="finite"):
        scorer_of(zoo("length"), weights=(weight,))


def test_no_function_at_all_is_refused(scorer_of):
    with pytest.raises(UserError, match="No reward function"):
        scorer_of()


def reasons(unscored: int, total: int) -> list[str | None]:
    return ["late"] * unscored + [None] * (total - unscored)


@pytest.mark.parametrize(("label", "reward"), [('{"a": 1}', 3.0), (None, 1.0), (" ", 1.0), ("{", None)])
def test_a_function_does_not_apply_to_a_row_without_the_column_that_it_needs(scorer_of, zoo, score, label, reward):
    (result,) = score(scorer_of(zoo("json_fields"), zoo("one")), ["{}"], label=[label])
    if reward is None:
        line = inspect.getsourcelines(zoo("json_fields").function)[1] + 1
        assert result.reason.endswith(f"(zoo.py, line {line})") and "JSONDecodeError" in result.reason
    else:
        assert result.value == reward


def test_what_only_trls_trainer_passes_is_named_as_such(scorer_of, zoo, score):
    (result,) = score(scorer_of(zoo("knows_the_step")), ["a"])
    assert isinstance(result, Unscored) and result.reason.startswith(
        "knows_the_step needs 'trainer_state', which TRL's trainer passes"
    )


def test_the_figure_of_a_function_counts_what_it_faulted():
    """By hand: one right program of eight is a mean of 1/8, and the sum has format's 1/2 besides: 5/8."""
    given = [[Failure("wrong"), 0.5]] * 7 + [[1.0, 0.5]]
    results = [combine(["code", "format"], [1.0, 1.0], parts, 0.0) for parts in given]
    written = Completion((2,), (0.0,), (0.0,), "stop", 0)
    rows = [Trajectory(0, k, (1,), written, 0, reward=r.value, parts=r.parts, status="failed") for k, r in enumerate(results)]
    figures = collection_metrics(rows, 8)
    assert figures["rewards/code/mean"] == 1 / 8 and figures["rewards/format/mean"] == 0.5 and figures["reward"] == 5 / 8
