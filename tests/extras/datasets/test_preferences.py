"""From rankings and ratings to pairs, and to thumbs: what is made, what is left out and counted, what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from psigrad.errors import UserError
from psigrad.language.data.dataset_rows import validate
from psigrad.language.data.sources import from_rows
from psigrad_extras.datasets import preferences

RATED = {"prompt": "p", "completions": ["a", "b", "c"], "ratings": [3, 9, 9], "tools": [{"name": "t"}]}
CHAT = [{"role": "user", "content": "p"}]


def test_every_ordered_pair_of_ratings_with_its_margin_and_the_other_columns():
    made = preferences.from_ratings([RATED])
    assert [(r["chosen"], r["rejected"], r["margin"]) for r in made.rows] == [("b", "a", 6.0), ("c", "a", 6.0)]
    assert made.ties == 1 and all(r["tools"] == RATED["tools"] for r in made.rows)
    assert all(validate(row, "preference", "row") for row in made.rows)


def test_a_difference_as_large_as_the_threshold_is_a_tie_whatever_floats_make_of_it():
    rows = [{"prompt": "p", "completions": ["a", "b"], "ratings": [1.3, 1.2]}]
    assert preferences.from_ratings(rows, tie=0.1).ties == 1
    assert len(preferences.from_ratings(rows, tie=0.05).rows) == 1


def test_rankings_have_the_smallest_number_first():
    made = preferences.from_rankings([{"prompt": "p", "completions": ["a", "b", "c"], "ranking": [2, 1, 3]}])
    assert [(r["chosen"], r["rejected"]) for r in made.rows] == [("b", "a"), ("a", "c"), ("b", "c")]


def test_a_pair_becomes_two_labelled_answers():
    rows = [
        {"prompt": "p", "chosen": "a", "rejected": "b", "tools": [{"name": "t"}]},
        {"prompt": "q", "chosen": "c", "rejected": "d"},
    ]
    apart = preferences.split_pairs([{**r, "margin": 2.0} for r in rows])
    assert [r["label"] for r in apart] == [True, False, True, False] and all("margin" not in r for r in apart)
    assert [r["completion"] for r in apart] == ["a", "b", "c", "d"] and apart[0]["tools"] == [{"name": "t"}]


def test_rows_of_a_prompt_are_grouped_whatever_the_order_of_names_in_its_messages():
    first = {"prompt": CHAT, "completion": [{"role": "assistant", "content": "a"}], "rating": 1}
    second = {"prompt": [{"content": "p", "role": "user"}], "completion": [{"role": "assistant", "content": "b"}], "rating": 2}
    (group,) = preferences.group_by_prompt([first, second], "rating")
    assert group["ratings"] == [1, 2]


@pytest.mark.parametrize(
    ("make", "row", "said"),
    [
        (preferences.from_ratings, {**RATED, "ratings": None}, "ratings"),
        (preferences.from_ratings, {**RATED, "ratings": 5}, "ratings"),
        (preferences.from_ratings, {**RATED, "ratings": [1, 2]}, "ratings"),
        (preferences.from_ratings, {**RATED, "ratings": [1, 2, float("nan")]}, "numbers"),
        (preferences.from_ratings, {**RATED, "ratings": [1, 2, 11]}, "from 1 to 10"),
        (preferences.from_ratings, {**RATED, "completions": ["a", "b", 3]}, r"completions\[2\]"),
        (preferences.from_ratings, {**RATED, "completions": [], "ratings": []}, "empty"),
        (preferences.from_rankings, {"prompt": "p", "completions": ["a"], "ranking": [True]}, "numbers"),
        (preferences.from_rankings, ["not", "a", "row"], "object"),
        (preferences.split_pairs, {"prompt": "p", "chosen": "a"}, "rejected"),
    ],
)
def test_a_bad_row_is_named(make, row, said):
    with pytest.raises(UserError, match=said) as caught:
        make([row], "file.jsonl")
    assert "file.jsonl:1" in str(caught.value)


def test_a_negative_tie_is_refused():
    with pytest.raises(UserError, match="tie"):
        preferences.from_ratings([RATED], tie=-1)


def test_pairs_are_labelled_answers_where_those_are_wanted():
    talk = [{"role": "user", "content": "p"}]
    said = [[{"role": "assistant", "content": text}] for text in "ab"]
    rows = [
        {"prompt": "p", "chosen": "a", "rejected": "b", "kept": 1},
        {"prompt": talk, "chosen": said[0], "rejected": said[1]},
        {"chosen": [*talk, *said[0]], "rejected": [*talk, *said[1]]},
    ]
    labelled = {"prompt": "q", "completion": "c", "label": False}
    found = from_rows([*rows, labelled], "unpaired-preference").rows
    apart = from_rows([*preferences.split_pairs(rows), labelled], "unpaired-preference").rows
    assert [replace(row, source="") for row in found] == [replace(row, source="") for row in apart] and len(found) == 7
    assert [row.label for row in found] == [True, False] * 3 + [False] and {row.rejected for row in found} == {None}
    with pytest.raises(UserError, match="rows:1: column 'rejected' is the same as chosen"):
        from_rows([{**rows[0], "rejected": "a"}], "unpaired-preference")
    with pytest.raises(UserError, match="column 'chosen' is missing"):  # negative control: only KTO's form takes them apart
        from_rows([labelled], "preference")
