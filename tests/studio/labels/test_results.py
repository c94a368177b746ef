"""Figures of a project: the statistics reach the right answers, and labellers with known habits are found out."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from psigrad_studio.labels import agreement, intake, results
from psigrad_studio.labels.ranking import bradley_terry
from psigrad_studio.labels.refusals import Conflict, Refusal


def label_all(made, person, answer):
    """`answer(shown)` gives the keywords of each vote."""
    while (shown := made.next(person)) is not None:
        made.vote(person, shown, **answer(shown))


def choose(shown, text_starts):
    return {"choice": ("left", "right")[next(n for n, c in enumerate(shown.completions) if c.startswith(text_starts))]}


@pytest.mark.one_database
def test_agreement_of_pairs_is_about_completions_and_not_sides(desks, db):
    made = desks(overlap=2)
    made.pairs(40)
    draw = random.Random(1)
    ann, bob = made.person("Ann"), made.person("Bob")
    label_all(made, ann, lambda shown: choose(shown, "good"))
    label_all(made, bob, lambda shown: choose(shown, "good" if draw.random() < 0.8 else "bad"))
    found = results.agreement(db, made.owner, made.project)
    assert (found.units, found.shared) == (40, 40)
    assert 0.6 < found.percent < 0.95
    assert found.fleiss is not None and [(k.first, k.second, k.units) for k in found.cohen] == [("Ann", "Bob", 40)]
    assert found.alpha["nominal"].value == pytest.approx(found.fleiss, abs=0.03)
    # as places are drawn by hash, chance agreement is near one half although "good" wins nearly always
    assert found.alpha["nominal"].value == pytest.approx(2 * found.percent - 1, abs=0.06)


@pytest.mark.one_database
def test_who_always_takes_the_left_side_is_found_out(desks, db):
    made = desks(overlap=2)
    made.pairs(60)
    label_all(made, made.person("Lefty"), lambda shown: {"choice": "left"})
    label_all(made, made.person("Fair"), lambda shown: choose(shown, "good"))
    position = results.agreement(db, made.owner, made.project).position
    assert position["Lefty"].value == 1 and position["Lefty"].p_value < 1e-10
    assert 0.3 < position["Fair"].value < 0.7 and position["Fair"].p_value > 0.01
    assert position[""].n == 120


@pytest.mark.one_database
def test_known_answers_tell_who_looks(desks, db):
    made = desks(overlap=2, checks=0)
    made.add([{"prompt": f"q{n}", "chosen": f"good {n}", "rejected": f"bad {n}"} for n in range(30)], gold=True)
    made.pairs(5)
    label_all(made, made.person("Ann"), lambda shown: choose(shown, "good"))
    label_all(made, made.person("Blind"), lambda shown: {"choice": "tie"})
    gold = results.agreement(db, made.owner, made.project).gold
    assert (gold["Ann"].value, gold["Ann"].n, gold["Blind"].value) == (1, 30, 0)


@pytest.mark.one_database
def test_ratings_are_ordered(desks, db):
    made = desks(kind="rating-5", overlap=2)
    made.add([{"prompt": f"q{n}", "completion": f"x{n}"} for n in range(30)])
    rating = {f"x{n}": 1 + n % 5 for n in range(30)}
    label_all(made, made.person("Ann"), lambda shown: {"rating": rating[shown.completions[0]]})
    label_all(made, made.person("Bob"), lambda shown: {"rating": min(5, rating[shown.completions[0]] + 1)})
    found = results.agreement(db, made.owner, made.project)
    assert found.alpha["nominal"].value < 0.2 < 0.6 < found.alpha["interval"].value
    table = np.array([[1 + n % 5, min(5, 2 + n % 5)] for n in range(30)]).T
    assert found.alpha["ordinal"].value == pytest.approx(agreement.krippendorff_alpha(table, "ordinal"))
    assert found.position == {}


def test_rankings_agree_pair_by_pair(desks, db):
    made = desks(kind="ranking", overlap=2)
    made.add([{"prompt": "q", "completions": ["x", "y", "z"]}])
    for name, ranks in (("Ann", {"x": 1, "y": 2, "z": 3}), ("Bob", {"x": 1, "z": 2, "y": 3})):
        label_all(made, made.person(name), lambda shown, ranks=ranks: {"ranks": tuple(ranks[c] for c in shown.completions)})
    found = results.agreement(db, made.owner, made.project)
    assert (found.units, found.percent) == (3, 2 / 3)


def test_a_project_without_answers_has_no_figures_and_no_ranking(desks, db):
    made = desks()
    made.pairs(3)
    found = results.agreement(db, made.owner, made.project)
    assert (found.units, found.fleiss, found.cohen, found.position) == (0, None, [], {})
    assert math.isnan(found.percent) and math.isnan(found.alpha["nominal"].value)
    with pytest.raises(Conflict, match="No answer compares completions"):
        results.ranking(db, made.owner, made.project)
    with pytest.raises(Refusal, match="did you mean 'sampler'"):
        results.ranking(db, made.owner, made.project, by="samplers")


def test_unequal_numbers_of_answers_leave_fleiss_out(desks, db):
    made = desks(overlap=2)
    made.pairs(3)
    ann, bob = made.person("Ann"), made.person("Bob")
    label_all(made, ann, lambda shown: {"choice": "left"})
    made.vote(bob, made.next(bob), "left")
    found = results.agreement(db, made.owner, made.project)
    assert found.fleiss is None and (found.units, found.shared) == (3, 1)


STRENGTH = {"best": 1.5, "middle": 0.0, "worst": -1.5}


def judged(draw, shown):
    """Bradley-Terry with ties, by the first word of each completion."""
    d = [STRENGTH[c.split()[0]] for c in shown.completions]
    weights = [math.exp((d[0] - d[1]) / 2), math.exp((d[1] - d[0]) / 2), 0.5]
    return {"choice": draw.choices(("left", "right", "tie"), weights)[0]}


@pytest.mark.one_database
def test_samplers_are_ranked_from_blind_votes(desks, db):
    made = desks()
    names = list(STRENGTH)
    made.add([{"prompt": f"q{n}", "completions": [f"{name} {n}" for name in names], "samplers": names} for n in range(70)])
    draw = random.Random(0)
    label_all(made, made.owner, lambda shown: judged(draw, shown))
    table = results.ranking(db, made.owner, made.project)
    assert [place.name for place in table.places] == names and table.comparisons == 210 and table.prior_sd is None
    assert [(place.best_rank, place.worst_rank) for place in table.places] == [(1, 1), (2, 2), (3, 3)]
    for place in table.places:
        assert place.low < STRENGTH[place.name] < place.high and place.comparisons == 140
    assert table.tie == pytest.approx(math.log(0.5), abs=0.6)


def test_a_sampler_that_never_loses_gets_a_finite_place_and_the_prior_is_named(desks, db):
    made = desks()
    made.add([{"prompt": f"q{n}", "completions": [f"good {n}", f"bad {n}"], "samplers": ["one", "two"]} for n in range(8)])
    label_all(made, made.owner, lambda shown: choose(shown, "good"))
    table = results.ranking(db, made.owner, made.project)
    assert table.prior_sd == results.PRIOR_SD and [p.name for p in table.places] == ["one", "two"]
    assert 0 < table.places[0].strength < 10


def test_texts_that_several_samplers_made_and_pairs_of_one_are_left_out_and_counted(desks, db):
    made = desks()
    made.add(
        [
            {"prompt": "q0", "completions": ["x", "y", "x"], "samplers": ["one", "two", "two"]},
            {"prompt": "q1", "completions": ["x", "y"], "samplers": ["one", "one"]},
            {"prompt": "q2", "completions": ["x", "y"], "samplers": ["one", "two"]},
        ]
    )
    label_all(made, made.owner, lambda shown: {"choice": "left"})
    table = results.ranking(db, made.owner, made.project)
    assert (table.comparisons, table.shared, table.same) == (1, 1, 1)


def test_answers_to_one_task_depend_on_one_another_with_the_prior_too(desks, db):
    """Three people answer alike. "last" never wins, so there is a prior; "one" and "two" win half of their tasks each, and three
    equal answers tell as much as one.
    """
    made = desks(overlap=3)
    best = {n: ("one", "two")[n % 2] for n in range(20)} | {20: "one", 21: "two"}
    pairs = {n: ["one", "two"] for n in range(20)} | {20: ["one", "last"], 21: ["two", "last"]}
    made.add([{"prompt": f"q{n}", "completions": [f"{s} {n}" for s in of], "samplers": of} for n, of in pairs.items()])
    for name in ("Ann", "Bob", "Cy"):
        label_all(made, made.person(name), lambda shown: choose(shown, best[int(shown.completions[0].split()[1])]))
    table = results.ranking(db, made.owner, made.project)
    assert table.prior_sd == results.PRIOR_SD and table.comparisons == 66
    i, j, won = zip(
        *(((0, 1, n % 2 == 0) if n < 20 else (n - 20, 2, True)) for n in sorted(pairs) for _ in range(3)), strict=True
    )
    alone = bradley_terry(i, j, won, 3, prior_sd=results.PRIOR_SD)
    apart = bradley_terry(i, j, won, 3, prior_sd=results.PRIOR_SD, cluster=np.repeat(sorted(pairs), 3))
    low, high = apart.interval()
    by_name = {place.name: place for place in table.places}
    assert (by_name["one"].low, by_name["one"].high) == pytest.approx((low[0], high[0]))
    between = np.array([1.0, -1.0, 0.0])
    narrow, wide = (np.sqrt(between @ found.covariance @ between) for found in (alone, apart))
    assert wide / narrow == pytest.approx(np.sqrt(3), rel=0.05)


def test_an_origin_without_a_name_is_no_second_maker(desks, db):
    made = desks()
    made.add([{"prompt": "q", "completions": ["x", "y"], "samplers": ["one", "two"]}])
    label_all(made, made.owner, lambda shown: choose(shown, "x"))
    made.add([{"prompt": "q", "completion": text, "reward": 0.5} for text in "xy"])  # scored, and brought in again
    table = results.ranking(db, made.owner, made.project)
    assert ([place.name for place in table.places], table.comparisons, table.shared) == (["one", "two"], 1, 0)


@pytest.mark.parametrize("kind", ["ranking", "rating-10"])
def test_rankings_and_ratings_rank_too(desks, db, kind):
    made = desks(kind=kind)
    names = list(STRENGTH)
    made.add([{"prompt": f"q{n}", "completions": [f"{name} {n}" for name in names], "samplers": names} for n in range(25)])
    draw = random.Random(2)

    def value(completion):
        return STRENGTH[completion.split()[0]] + draw.gauss(0, 1.2)

    def answer(shown):
        values = [value(c) for c in shown.completions]
        if kind == "ranking":
            return {"ranks": tuple(1 + sum(other > v for other in values) for v in values)}
        return {"rating": max(1, min(10, round(5.5 + 1.5 * values[0])))}

    label_all(made, made.owner, answer)
    table = results.ranking(db, made.owner, made.project)
    assert [place.name for place in table.places] == names and table.comparisons == 75


def test_runs_and_steps_can_be_ranked(desks, db):
    made = desks()
    rows = [
        {"prompt": f"q{n}", "completion": f"{run} {step} {n}", "run": run, "step": step, "k": 0, "sampler": f"step {step}"}
        for n in range(10)
        for run in ("run a", "run b")
        for step in (1, 2)
    ]
    intake.add_rows(db, made.owner, made.project, rows)
    label_all(made, made.owner, lambda shown: {"choice": "left"})
    assert {p.name for p in results.ranking(db, made.owner, made.project, "step").places} == {
        f"run {r}@{s}" for r in "ab" for s in (1, 2)
    }
    runs = results.ranking(db, made.owner, made.project, "run")
    assert {p.name for p in runs.places} == {"run a", "run b"} and (runs.comparisons, runs.same) == (40, 20)
    samplers = results.ranking(db, made.owner, made.project, "sampler")
    assert {p.name for p in samplers.places} == {f"run {r}: step {s}" for r in "ab" for s in (1, 2)}
    assert len(results.ranking(db, made.owner, made.project, "completion").places) == 40
