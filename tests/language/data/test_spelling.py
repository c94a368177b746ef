"""The demo's task without reasoning-gym: its rows and scores, to the bit."""

from __future__ import annotations

import random
import sys

import pytest
import reasoning_gym

from psigrad.errors import UserError
from psigrad.language.data import tasks
from psigrad.language.rewards import builtin

ITS_SCORER = reasoning_gym.get_score_answer_fn(tasks.TASK)


@pytest.mark.parametrize(("seed", "shortest", "longest"), [(0, 3, 8), (1234567, 3, 5), (8, 6, 6)])
def test_rows_are_those_of_reasoning_gym(seed, shortest, longest):
    made = reasoning_gym.create_dataset(tasks.TASK, size=300, seed=seed, min_word_len=shortest, max_word_len=longest)
    rows = tasks.spell_rows(300, seed, min_word_len=shortest, max_word_len=longest)
    assert [(r["prompt"], r["answer"], r["metadata"]) for r in rows] == [
        (e["question"], e["answer"], e["metadata"]) for e in made
    ]
    assert rows != tasks.spell_rows(300, seed + 1, min_word_len=shortest, max_word_len=longest), "negative control"


@pytest.mark.parametrize(
    ("settings", "ours"),
    [
        ({"min_word_len": 3, "max_word_len": 5}, True),
        ({"max_word_len": 8}, True),
        ({"min_word_len": 5, "max_word_len": 5}, True),
        ({"min_word_len": 2, "max_word_len": 5}, False),
        ({"min_word_len": 3, "max_word_len": 9}, False),
        ({"min_word_len": 6, "max_word_len": 5}, False),
        ({"min_word_len": 3}, False),  # reasoning-gym's longest word has 10 letters by default
        ({"max_word_len": 5, "seed": 1}, False),
    ],
)
def test_which_settings_need_no_library(settings, ours):
    assert tasks.can_spell(tasks.TASK, settings) == ours
    assert not tasks.can_spell("gcd", settings)


def test_every_word_is_in_its_file_and_in_its_order():
    its = reasoning_gym.create_dataset(tasks.TASK, size=1, max_word_len=tasks.LONGEST).words
    assert list(tasks.load_words()) == its


def test_scores_are_its_scores_to_the_bit():
    rng = random.Random(0)
    for _ in range(2000):
        answer = "".join(rng.choice("abC") for _ in range(rng.randint(1, 10)))
        text = answer[: rng.randint(0, 10)] + "".join(rng.choice("abc") for _ in range(rng.randint(0, 3)))
        assert tasks.score_spelling(text, {"answer": answer}) == ITS_SCORER(text, {"answer": answer}), (text, answer)
    assert tasks.score_spelling("SUN", {"answer": "sun"}) == 1
    assert tasks.score_spelling("sue", {"answer": "sun"}) == 1 / 3 + 1 / 3
    assert tasks.score_spelling("suns", {"answer": "sun"}) == 0.8


def test_it_needs_no_other_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    builtin._scorer.cache_clear()
    (row,) = tasks.rows_by_name("task:spell_backward,size=1,max_word_len=4")
    columns = {name: [row[name]] for name in ("task", "answer", "metadata")}
    assert builtin.reasoning_gym([row["answer"]], **columns) == [1.0]
    for wider in ("max_word_len=9", "min_word_len=2,max_word_len=8", "min_word_len=8,max_word_len=3"):
        with pytest.raises(UserError, match="demo's task, task:spell_backward,max_word_len=8"):
            tasks.rows_by_name(f"task:spell_backward,size=1,{wider}")
