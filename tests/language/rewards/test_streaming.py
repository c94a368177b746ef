"""Completions that are scored as they come: the same results as all at once, sooner, and nobody is called late unheard."""

from __future__ import annotations

import random
import time

import pytest
from inline_scorer import InlineScorer

from psigrad.language.rewards import Samples, Scored, Scoring, Unscored
from psigrad.processes.workers import worker_pool


def add(scoring, texts, **columns):
    scoring.add(Samples(["question"] * len(texts), texts, [[1]] * len(texts), columns, [[7]] * len(texts)))


@pytest.mark.parametrize("workers", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_results_are_those_of_all_at_once(pool_of, zoo, score, workers):
    """Six groups, three of which lose a process or two; their results differ, so that any other order is seen."""
    rng = random.Random(9)
    texts = [rng.choice(["ok", "half", "os._exit", "nonsense", "ok", "half"]) for _ in range(24)]
    specs = (zoo("act"), zoo("rank_in_group"))
    whole = score(pool_of(*specs, timeout=30.0), texts)
    streaming = pool_of(*specs, timeout=30.0, workers=workers).begin()
    for start in range(0, len(texts), 4):
        add(streaming, texts[start : start + 4])
        streaming.poll()
    assert streaming.results() == whole
    assert any(isinstance(r, Unscored) for r in whole) and any(isinstance(r, Scored) for r in whole)


def test_a_scorer_without_a_beginning_is_asked_at_the_end(zoo, score):
    scorer = InlineScorer([zoo("rank_in_group")])
    scoring = scorer.begin()
    assert type(scoring) is Scoring
    texts = ["a", "ccc", "bb", "d", "eee", "ff"]
    for start in (0, 3):
        add(scoring, texts[start : start + 3])
    assert scoring.results() == score(scorer, texts, size=3)
    assert scorer.begin().results() == []


def test_work_is_done_before_the_results_are_asked_for(pool_of, zoo, score):
    working = pool_of(zoo("act"), timeout=30.0)
    score(working, ["ok"])
    scoring = working.begin()
    add(scoring, ["ok", "half"])
    end = time.monotonic() + 60
    while not scoring._parts[0] and time.monotonic() < end:
        time.sleep(0.01)
        scoring.poll()
    assert len(scoring._parts[0]) == 2


def test_a_scoring_that_was_given_up_disturbs_no_later_one(pool_of, zoo, score):
    working = pool_of(zoo("act"), timeout=30.0)
    score(working, ["ok"])
    given_up = working.begin()
    add(given_up, ["sleep", "ok"])
    begun = time.monotonic()
    assert [r.value for r in score(working, ["half", "ok"])] == [0.5, 1.0]
    assert time.monotonic() - begun < 20, "it waited for what nobody asks for any more"


@pytest.mark.parametrize("absence", [0.3, float("inf")])
def test_who_answers_while_nobody_listens_is_not_late(pool_of, zoo, score, monkeypatch, absence):
    """The control, where absence never counts, shows that the deadline does pass meanwhile."""
    monkeypatch.setattr(worker_pool, "ABSENCE", absence)
    working = pool_of(zoo("act"), timeout=0.5)
    score(working, ["ok"])
    scoring = working.begin()
    add(scoring, ["sleep"])
    before = working.workers.processes
    time.sleep(0.8)
    scoring.poll()
    assert (working.workers.processes == before) == (absence == 0.3)
    begun = time.monotonic()
    (result,) = scoring.results()
    assert isinstance(result, Unscored) and "time-out" in result.reason, "heard at last, it is late like any other"
    assert time.monotonic() - begun < 20
