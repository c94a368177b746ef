"""Questions of a project's own: what may be asked and answered, aspect by aspect what the answers say, and rows to train on."""

from __future__ import annotations

import label_checks
import pytest
from sqlalchemy import select

from psigrad_studio.labels import assignments, export, projects, results
from psigrad_studio.labels.assignments import LabelAnswer
from psigrad_studio.labels.questions import Question
from psigrad_studio.labels.refusals import Refusal
from psigrad_studio.labels.schema import LabelTask

HELPFUL = Question("helpful", weight=3)
TRUE = Question("true", "scale", ask="How true is it?", top=5, why=True)
KIND = Question("kind", "choice", options=("answer", "refusal"), required=False)
NOTE = Question("note", "text", required=False)


def answered(shown, favourite, other, **more):
    """Answers in which `favourite` is the more helpful text, and true to the degree that `other` says of both."""
    at = shown.completions.index(favourite)
    true = [other[text] for text in shown.completions]
    return {"helpful": {"value": ("left", "right")[at], "strength": 2}, "true": {"value": true, "reason": "I looked"}, **more}


@pytest.fixture
def labelled(desks):
    """One pair, answered by two people: both find "x" more helpful; Ann finds it truer by 1 of 4, Bob the other by 4 of 4."""
    made = desks(overlap=2, strengths=2, questions=(HELPFUL, TRUE, KIND, NOTE))
    made.add([{"prompt": "q", "completions": ["x", "y"]}])
    for name, true in (("Ann", {"x": 3, "y": 2}), ("Bob", {"x": 1, "y": 5})):
        person = made.person(name)
        shown = made.next(person)
        more = {"kind": {"value": "refusal"}, "note": {"value": "  both short "}} if name == "Ann" else {}
        made.vote(
            person, shown, ("left", "right")[shown.completions.index("y")], strength=1, answers=answered(shown, "x", true, **more)
        )
    return made


@pytest.mark.parametrize(
    "questions, settings, said",
    [
        ((Question("a"), Question("a")), {}, "Two questions are called 'a'"),
        ((HELPFUL,), {"kind": "rating-5"}, "'helpful' asks which of two completions is better, but only one is shown"),
        ((TRUE,), {"kind": "ranking"}, "A ranking project asks only for the order"),
        ((), {"overall": False}, "would ask nothing"),
    ],
)
def test_a_project_that_cannot_be_asked_is_refused(desks, questions, settings, said):
    with pytest.raises(Refusal, match=said):
        desks(questions=questions, **settings)


@pytest.mark.parametrize(
    "given, said",
    [
        ({"kind": "chioce"}, "did you mean 'choice'"),
        ({"kind": "choice", "options": ("one",)}, "2 to 30 that differ"),
        ({"kind": "choice", "options": ("one", "one")}, "2 to 30 that differ"),
        ({"top": 11}, "2 to 10"),
        ({"name": "weighted"}, "neither 'weighted'"),
        ({"weight": -1.0}, "0 to 1000"),
    ],
)
def test_a_question_that_is_none_is_refused(given, said):
    with pytest.raises(Refusal, match=said):
        Question(**{"name": "a"} | given)


@pytest.mark.parametrize(
    "answers, said",
    [
        ({}, "'helpful' is required"),
        ({"helpful": {"value": "a"}}, "expected left, right or tie"),
        ({"helpful": {"value": "left", "strength": 3}}, "expected 1 to 2"),
        ({"helpful": {"value": "tie", "strength": 1}}, "expected 1 to 2 together with a chosen side"),
        ({"helpful": {"value": "tie"}, "true": {"value": [1]}}, "expected 2 whole numbers from 1 to 5"),
        ({"helpful": {"value": "tie"}, "true": {"value": [1, 6]}}, "expected 2 whole numbers from 1 to 5"),
        ({"helpful": {"value": "tie"}, "true": {"value": [1, True]}}, "expected 2 whole numbers"),
        ({"helpful": {"value": "tie"}, "true": {"value": [1, 1]}, "kind": {"value": "joke"}}, "one of answer, refusal"),
        ({"helpful": {"value": "tie"}, "true": {"value": [1, 1]}, "note": {"value": 5}}, "a text"),
        ({"helpful": {"value": "tie"}, "true": {"value": [1, 1], "reason": 5}}, "The reason of 'true'"),
        ({"helpfull": {"value": "tie"}}, "did you mean 'helpful'"),
        ({"helpful": {"value": "tie", "mood": 1}}, "must be an object with value"),
    ],
)
def test_an_answer_that_does_not_fit_is_refused_and_nothing_is_stored(desks, db, answers, said):
    made = desks(strengths=2, questions=(HELPFUL, TRUE, KIND, NOTE))
    made.pairs(1)
    shown = made.next(made.owner)
    with pytest.raises(Refusal, match=said):
        made.vote(made.owner, shown, "tie", answers=answers)
    assert export.dump(db, made.owner, made.project) == []


def test_answers_are_stored_by_place_whatever_side_was_seen(labelled, db):
    rows = export.dump(db, labelled.owner, labelled.project)
    assert {tuple(row["display"]) for row in rows} <= {(0, 1), (1, 0)}
    for row, true in zip(rows, ({"x": 3, "y": 2}, {"x": 1, "y": 5}), strict=True):
        texts = [one["text"] for one in row["completions"]]
        assert texts["ab".index(row["answers"]["helpful"]["value"])] == "x" and row["answers"]["helpful"]["strength"] == 2
        assert row["answers"]["true"] == {"kind": "scale", "value": [true[text] for text in texts], "reason": "I looked"}
        assert texts["ab".index(row["choice"])] == "y", "the main answer is another"
    assert rows[0]["answers"]["kind"] == {"kind": "choice", "value": "refusal"} and "kind" not in rows[1]["answers"]


def test_both_display_orders_mean_the_same(desks, db):
    """Eight people, so that both orders are seen: all prefer and rate the same text."""
    made = desks(overlap=8, questions=(HELPFUL, TRUE))
    made.add([{"prompt": "q", "completions": ["x", "y"]}])
    seen = set()
    for n in range(8):
        person = made.person(f"P{n}")
        shown = made.next(person)
        seen.add(tuple(shown.completions))
        given = answered(shown, "x", {"x": 4, "y": 1})
        del given["helpful"]["strength"]
        made.vote(person, shown, "tie", answers=given)
    assert len(seen) == 2
    assert len({str(row["answers"]) for row in export.dump(db, made.owner, made.project)}) == 1


def test_agreement_of_every_aspect_by_hand(labelled, db):
    """On "helpful" two equal answers. On "true" the units are the completions, rated 3 and 1, and 2 and 5: none is equal."""
    found = results.by_aspect(db, labelled.owner, labelled.project)
    assert list(found) == ["", "helpful", "true", "kind", "weighted"]
    assert found[""].percent == found["helpful"].percent == 1.0
    true = found["true"]
    assert (true.percent, true.units, set(true.alpha)) == (0.0, 2, {"nominal", "ordinal", "interval"})
    # interval: observed (4 + 9)·2 / 4 = 6.5; expected: the pairs of 1, 2, 3, 5 differ by 1+4+16+1+9+4 = 35, ·2 / 12 = 35/6
    assert true.alpha["interval"].value == pytest.approx(1 - 6.5 / (35 / 6))
    assert found["kind"].shared == 0, "only Ann answered it"


def test_the_weighted_judgement_by_hand(labelled, db):
    """helpful weighs 3, true 1. Ann: (3·1 + 1·(3 − 2)/4) / 4 = 13/16 for x. Bob: (3·1 + 1·(1 − 5)/4) / 4 = 1/2 for x."""
    (row,) = export.preference(db, labelled.owner, labelled.project, margin=True, aspect="weighted").rows
    assert (row["chosen"], row["rejected"], row["criterion"]) == ("x", "y", "weighted")
    assert row["margin"] == pytest.approx((13 / 16 + 1 / 2) / 2)


def test_each_aspect_has_rows_of_its_own(labelled, db):
    def take(aspect, votes="majority"):
        return export.preference(db, labelled.owner, labelled.project, votes, margin=True, aspect=aspect)

    assert [row["chosen"] for row in take("").rows] == ["y"] and "criterion" not in take("").rows[0]
    (helpful,) = take("helpful").rows
    assert (helpful["chosen"], helpful["margin"], helpful["lineage"]["share"]) == ("x", 2.0, 1.0)
    assert take("true").rows == [] and take("true").left_out == {"split": 1}
    assert sorted((row["chosen"], row["margin"]) for row in take("true", "each").rows) == [("x", 1.0), ("y", 4.0)]
    assert [row["criterion"] for row in take("each").rows] == ["helpful", "weighted"]
    thumbs = export.unpaired(db, labelled.owner, labelled.project, aspect="helpful").rows
    assert {(row["completion"], row["label"]) for row in thumbs} == {("x", True), ("y", False)}
    for aspect, said in (("kind", "gives no training rows"), ("note", "free-text"), ("helpfull", "did you mean 'helpful'")):
        with pytest.raises(Refusal, match=said):
            take(aspect)
    best = results.ranking(db, labelled.owner, labelled.project, "completion", "helpful").places[0]
    assert best.strength > 0 and best.comparisons == 2


def test_one_completion_and_only_questions_of_ones_own(desks, db):
    made = desks(kind="rating-5", overall=False, questions=(TRUE, Question("short", "scale", top=3, weight=0.5), KIND))
    made.add([{"prompt": "q", "completions": ["x", "y"]}])
    rated = {"x": (5, 1), "y": (2, 3)}
    while (shown := made.next(made.owner)) is not None:
        (text,) = shown.completions
        with pytest.raises(Refusal, match="expected only answers to its own questions"):
            made.vote(made.owner, shown, rating=3)
        true, short = rated[text]
        made.vote(made.owner, shown, answers={"true": {"value": [true]}, "short": {"value": [short]}})

    def take(aspect):
        return export.preference(db, made.owner, made.project, margin=True, aspect=aspect).rows

    assert [(row["chosen"], row["margin"]) for row in take("true")] == [("x", 3.0)]
    assert [(row["chosen"], row["margin"]) for row in take("short")] == [("y", 2.0)]
    # x: (1·1 + 0.5·0) / 1.5 = 2/3; y: (1·1/4 + 0.5·1) / 1.5 = 1/2; on a scale from 1 to 10 they differ by 9/6
    assert [(row["chosen"], row["margin"]) for row in take("weighted")] == [("x", pytest.approx(1.5))]
    with pytest.raises(Refusal, match="only custom questions; name one of them: true, short, weighted"):
        take("")
    assert label_checks.faults(db) == []
    made.undo(made.owner)
    assert assignments.mine(db, made.owner, made.project)["answered"] == 1


def test_without_any_answer_nothing_is_stored(desks):
    made = desks(overall=False, questions=(Question("a", required=False),))
    made.pairs(1)
    with pytest.raises(Refusal, match="None of the questions is answered"):
        made.vote(made.owner, made.next(made.owner))


def test_questions_are_added_and_reworded_and_never_lost(labelled, db):
    def change(*questions):
        projects.change(db, labelled.owner, labelled.project, {"questions": questions})

    new = (NOTE, KIND, HELPFUL, Question("true", "scale", ask="In other words?"), Question("tone", "better", required=False))
    change(*new)
    assert projects.info(db, labelled.owner, labelled.project).settings.questions == new
    assert len(export.preference(db, labelled.owner, labelled.project, aspect="helpful").rows) == 1
    with pytest.raises(Refusal, match="'helpful' cannot be removed"):
        change(TRUE, KIND, NOTE)
    with pytest.raises(Refusal, match="The kind, scale and options of 'true' cannot be changed"):
        change(*new[:3], Question("true", "scale", top=7), new[4])


def test_a_page_that_asks_the_main_question_alone_may_still_store_it(desks, db):
    made = desks(questions=(HELPFUL,))
    made.pairs(1)
    with db.session(write=False) as session:
        task = session.scalars(select(LabelTask.id)).one()
    assignments.record(db, made.owner, task, [0, 1], LabelAnswer(choice="left"), "a key of its own")
    assert [row["choice"] for row in export.dump(db, made.owner, made.project)] == ["a"]


def test_equal_weighted_judgements_are_equal(desks, db):
    """3 and 10 of two scales to 10 are (2/9 + 9/9) / 2 = 11/18, as 4 and 9 are: 6.5 on a scale from 1 to 10."""
    asked = (Question("first", "scale", top=10), Question("second", "scale", top=10))
    made = desks(kind="rating-5", overall=False, overlap=2, questions=asked)
    made.add([{"prompt": "q", "completion": "x"}])
    for name, (first, second) in (("Ann", (3, 10)), ("Bob", (4, 9))):
        person = made.person(name)
        made.vote(person, made.next(person), answers={"first": {"value": [first]}, "second": {"value": [second]}})
    assert results.agreement(db, made.owner, made.project, "weighted").percent == 1.0


def test_equal_means_of_weighted_judgements_are_a_tie(desks, db):
    """1, 2 and 6 sum to 9 as 1, 3 and 5 do."""
    made = desks(kind="rating-5", overall=False, overlap=3, questions=(Question("true", "scale", top=6),))
    made.add([{"prompt": "q", "completions": ["x", "y"]}])
    for name, rated in (("Ann", {"x": 1, "y": 1}), ("Bob", {"x": 2, "y": 3}), ("Cy", {"x": 6, "y": 5})):
        person = made.person(name)
        while (shown := made.next(person)) is not None:
            made.vote(person, shown, answers={"true": {"value": [rated[shown.completions[0]]]}})
    found = export.preference(db, made.owner, made.project, aspect="weighted")
    assert found.rows == [] and found.left_out == {"tie": 1}


def test_aspects_that_weigh_nothing_are_not_weighed(desks, db):
    made = desks(questions=(Question("kind", weight=0), Question("true", "scale", weight=0)))
    made.pairs(1)
    shown = made.next(made.owner)
    made.vote(made.owner, shown, "left", answers={"kind": {"value": "left"}, "true": {"value": [4, 2]}})
    assert list(results.by_aspect(db, made.owner, made.project)) == ["", "kind", "true"]
    each = export.preference(db, made.owner, made.project, aspect="each").rows
    assert [(row["criterion"], row["chosen"]) for row in each] == [("kind", shown.completions[0]), ("true", shown.completions[0])]
    with pytest.raises(Refusal, match="nothing to weight"):
        results.agreement(db, made.owner, made.project, "weighted")


def test_strengths_stay_once_an_answer_has_one(desks, db):
    """On "kind" good is better by 2 of 5, on "true" bad by (4 − 1) of 4: (2/5 − 3/4) / 2 is 0.175 for bad. Out of one grade the
    same answers would be (2 − 3/4) / 2 = 0.625 for good.
    """
    made = desks(strengths=5, overall=False, questions=(Question("kind"), Question("true", "scale")))
    made.pairs(1)

    def change(strengths):
        projects.change(db, made.owner, made.project, {"strengths": strengths})

    change(3)
    change(5)
    shown = made.next(made.owner)
    at = shown.completions.index("good 0")
    kind, true = {"value": ("left", "right")[at], "strength": 2}, {"value": [(1, 4)[n != at] for n in range(2)]}
    made.vote(made.owner, shown, answers={"kind": kind, "true": true})
    for other in (0, 3):
        with pytest.raises(Refusal, match="answers with a strength out of 5"):
            change(other)
    projects.change(db, made.owner, made.project, {"strengths": 5, "instructions": "Look twice."})
    (row,) = export.preference(db, made.owner, made.project, margin=True, aspect="weighted").rows
    assert (row["chosen"], row["margin"]) == ("bad 0", pytest.approx(0.175))
    made.undo(made.owner)
    change(0)


def test_a_strength_of_the_main_question_stays_too(desks, db):
    made = desks(strengths=3)
    made.pairs(2)
    made.vote(made.owner, made.next(made.owner), "left")
    projects.change(db, made.owner, made.project, {"strengths": 2})
    made.vote(made.owner, made.next(made.owner), "left", strength=1)
    with pytest.raises(Refusal, match="out of 2"):
        projects.change(db, made.owner, made.project, {"strengths": 3})


# ---- attention checks


def planted(desks, checks=40, pairs=20, known=12, **settings):
    made = desks(checks=checks, **settings)
    made.pairs(pairs)
    added = made.add([{"prompt": f"q{n}", "chosen": f"good {n}", "rejected": f"bad {n}"} for n in range(known)], gold=True)
    assert (added.tasks, added.checks) == (known, known)
    return made


def work(made, person, choose, most=1000):
    """How many of the tasks were checks, by place."""
    met = []
    while len(met) < most and (shown := made.next(person)) is not None:
        met.append(shown.prompt.startswith("q") and not shown.prompt.startswith("question"))
        made.vote(person, shown, ("left", "right")[next(i for i, c in enumerate(shown.completions) if c.startswith(choose))])
    return met


def test_checks_are_met_by_everybody_at_places_drawn_for_each(desks, db):
    made = planted(desks, overlap=2)
    ann, bob = (work(made, made.person(name), "good") for name in ("Ann", "Bob"))
    for met in (ann, bob):
        assert len(met) - sum(met) == 20, "every ordinary task, and checks between them"
        assert 4 <= sum(met) <= 12  # 40 of a hundred, and at most as many as there are
        assert sum(met[-4:]) < 4, "not in a row at the end"
    assert ann != bob
    assert assignments.left(db, made.owner, made.project) == 0


@pytest.mark.one_database
def test_the_rate_of_each_labeller_is_shown_and_checks_are_never_exported(desks, db):
    made = planted(desks, overlap=2)
    work(made, made.person("Ann"), "good")
    work(made, made.person("Blind"), "bad")
    found = results.agreement(db, made.owner, made.project)
    assert found.gold["Ann"].value == 1.0 and found.gold["Blind"].value == 0.0 and found.gold["Ann"].n >= 4
    assert found.units == 20 and found.percent == 0.0, "of the ordinary tasks alone"
    made_rows = export.preference(db, made.owner, made.project, "each")
    assert made_rows.left_out == {"check": 12} and all(row["prompt"].startswith("question") for row in made_rows.rows)
    dumped = [row for row in export.dump(db, made.owner, made.project) if row["known"]]
    assert [row["check"] for row in dumped] == [True] * len(dumped)
    assert len(dumped) == found.gold[""].n and {row["rater"] for row in dumped} == {"Ann", "Blind"}
    assert label_checks.faults(db) == []


def test_a_check_can_be_undone_and_a_higher_overlap_makes_no_ordinary_task_of_it(desks, db):
    made = planted(desks, checks=50, pairs=3, known=3)
    ann = made.person("Ann")
    while not (shown := made.next(ann)).prompt.startswith("q") or shown.prompt.startswith("question"):
        made.vote(ann, shown, "tie")
    made.vote(ann, shown, "tie")
    made.undo(ann)
    assert made.next(ann).prompt == shown.prompt
    before = projects.progress(db, made.owner, made.project).wanted
    projects.change(db, made.owner, made.project, {"overlap": 3})
    assert projects.progress(db, made.owner, made.project).wanted == before + 2 * 3


def test_a_project_of_checks_alone_gives_them_all_to_everybody(desks):
    made = planted(desks, checks=10, pairs=0, known=4)
    assert [len(work(made, made.person(name), "good")) for name in ("Ann", "Bob")] == [4, 4]


def test_without_checks_known_answers_are_ordinary_tasks_and_with_them_none(desks, db):
    """Three checks and three pairs. Ann meets one check; then checks are turned off, on, and off again."""
    made = planted(desks, checks=50, pairs=3, known=3, overlap=2)
    ann, bob = made.person("Ann"), made.person("Bob")

    def change(**settings):
        projects.change(db, made.owner, made.project, settings)
        found = projects.progress(db, made.owner, made.project)
        return found.wanted, found.answered

    assert change(instructions="Look twice.") == (3 * 2, 0), "a check is wanted of nobody"
    while not (shown := made.next(ann)).prompt.startswith("q") or shown.prompt.startswith("question"):
        made.vote(ann, shown, "tie")
    made.vote(ann, shown, "tie")
    others = projects.progress(db, made.owner, made.project).answered - 1
    assert change(checks=0) == (3 * 2 + 3 * 2, 1 + others)
    assert export.preference(db, made.owner, made.project).left_out["unanswered"] == 2 + (3 - others)
    assert change(checks=10) == (3 * 2 + 1, 1 + others), "of the checks the one seat that is taken stays"
    assert export.preference(db, made.owner, made.project).left_out["check"] == 3
    assert change(checks=0, overlap=3) == (6 * 3, 1 + others)
    met = sum(work(made, ann, "good")), sum(work(made, bob, "good"))
    assert met == (2, 3) and label_checks.faults(db) == []


def test_a_check_that_somebody_is_at_stays_theirs(desks, db):
    made = planted(desks, checks=0, pairs=0, known=1)
    shown = made.next(made.owner)
    projects.change(db, made.owner, made.project, {"checks": 10})
    made.vote(made.owner, shown, "tie")
    assert [row["check"] for row in export.dump(db, made.owner, made.project)] == [True]


def test_what_was_brought_in_can_be_taken_out_again(desks, db, clock):
    from psigrad_studio.labels import intake

    made = desks()
    made.pairs(2)
    clock.advance(1)
    since = clock()
    made.add([{"prompt": f"wrong {n}", "completions": ["x", "y"]} for n in range(3)], priority=1)
    clock.advance(0.001)
    other = made.person("Adm", "admin")
    intake.add_rows(db, other, made.project, [{"prompt": "another's", "completions": ["x", "y"]}])
    until = clock()
    clock.advance(1)
    made.add([{"prompt": "right", "completions": ["x", "y"]}])
    assert made.next(made.owner).prompt.startswith("wrong")
    assert intake.withdraw(db, made.owner, made.project, since, until) == {"tasks": 2, "begun": 1}
    assert projects.progress(db, made.owner, made.project).tasks == 5, "what came in later stays, and what another brought in"
    made.add([{"prompt": "wrong 1", "completions": ["x", "y"]}])
    assert projects.progress(db, made.owner, made.project).tasks == 6, "it can be brought in again"
    with pytest.raises(Refusal):
        intake.withdraw(db, made.person("Ann"), made.project, 0, until)
