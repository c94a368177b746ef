"""What goes out: every label once, in TRL's forms, with its lineage; what is left out is counted; and it can be trained on."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from datasets import Dataset

from psigrad.errors import UserError
from psigrad.language.data.dataset_rows import validate
from psigrad_extras.datasets import preferences
from psigrad_studio.labels import completion_groups, export, intake
from psigrad_studio.labels.refusals import Refusal

TALK = [{"role": "user", "content": "hello"}]


def said(text):
    return [{"role": "assistant", "content": text}]


@pytest.fixture
def labelled(desks):
    """Two people, six pairs: agreed, tied, bad, split, skipped by both, and one that nobody saw."""
    made = desks(overlap=2)
    made.ann, made.bob = made.person("Ann"), made.person("Bob")
    rows = [
        {"prompt": f"q{n}", "level": n, "completions": [f"good {n}", f"bad {n}"], "samplers": ["one", "two"]} for n in range(6)
    ]
    made.add([row | {"run": "a run", "step": n, "k": 0, "row": n, "reward": 0.5} for n, row in enumerate(rows)])
    script = {
        "q0": ("good", "good"),
        "q1": ("tie", "tie"),
        "q2": ("both_bad", "both_bad"),
        "q3": ("good", "bad"),
        "q4": ("skip", "skip"),
    }
    for column, person in enumerate((made.ann, made.bob)):
        for _ in range(5):
            shown = made.next(person)
            step = script[shown.prompt][column]
            if step == "skip":
                made.skip(person, shown)
            elif step in ("tie", "both_bad"):
                made.vote(person, shown, step)
            else:
                made.prefer(person, shown, next(c for c in shown.completions if c.startswith(step)))
    return made


def test_the_majority_and_what_is_left_out(labelled, db):
    found = export.preference(db, labelled.owner, labelled.project)
    (row,) = found.rows
    assert (row["prompt"], row["chosen"], row["rejected"], row["level"]) == ("q0", "good 0", "bad 0", 0)
    assert found.left_out == Counter(tie=1, both_bad=1, split=1, skipped=1, unanswered=1)


def test_each_vote_is_a_row(labelled, db):
    found = export.preference(db, labelled.owner, labelled.project, "each")
    assert Counter(row["prompt"] for row in found.rows) == {"q0": 2, "q3": 2}
    assert {row["chosen"] for row in found.rows if row["prompt"] == "q3"} == {"good 3", "bad 3"}
    assert found.left_out == Counter(tie=2, both_bad=2, skipped=1, unanswered=1)


def test_lineage_leads_to_run_step_rollout_and_votes(labelled, db):
    (row,) = export.preference(db, labelled.owner, labelled.project).rows
    lineage = row["lineage"]
    assert (lineage["project"], lineage["share"], len(lineage["votes"])) == ("project 1", 1.0, 2)
    for side, sampler in (("chosen", "one"), ("rejected", "two")):
        (origin,) = lineage[side]
        expected = {"run": "a run", "step": 0, "row": 0, "k": 0, "reward": 0.5, "sampler": sampler, "source": "rows:1"}
        assert expected.items() <= origin.items() and set(origin) == set(completion_groups.LINEAGE)
    dumped = {line["vote"]: line for line in export.dump(db, labelled.owner, labelled.project)}
    assert all(dumped[vote]["prompt"] == "q0" and dumped[vote]["stands"] for vote in lineage["votes"])


def test_unpaired_rows_of_pairs(labelled, db):
    found = export.unpaired(db, labelled.owner, labelled.project)
    labels = {(row["prompt"], row["completion"]): row["label"] for row in found.rows}
    assert labels == {("q0", "good 0"): True, ("q0", "bad 0"): False, ("q2", "good 2"): False, ("q2", "bad 2"): False}
    assert found.left_out == Counter(tie=1, split=1, skipped=1, unanswered=1)
    # beside "both bad" they are what the preference rows give
    pairs = [
        {k: v for k, v in row.items() if k != "lineage"} for row in export.preference(db, labelled.owner, labelled.project).rows
    ]
    ours = [{k: v for k, v in row.items() if k != "lineage"} for row in found.rows if row["prompt"] == "q0"]
    assert sorted(map(str, map(sorted_row, preferences.split_pairs(pairs)))) == sorted(map(str, map(sorted_row, ours)))


def sorted_row(row):
    return sorted(row.items())


def test_an_undone_vote_is_not_exported_and_is_in_the_dump(labelled, db):
    labelled.undo(labelled.ann)  # the skip of q4
    labelled.undo(labelled.ann)  # the vote on q3
    found = export.preference(db, labelled.owner, labelled.project)
    assert {row["prompt"]: row["chosen"] for row in found.rows} == {"q0": "good 0", "q3": "bad 3"}
    lines = export.dump(db, labelled.owner, labelled.project)
    assert Counter(line["action"] for line in lines) == {"vote": 8, "skip": 2, "undo": 2}
    assert [line["vote"] for line in lines if not line["stands"] and line["action"] == "vote"] == [lines[-1]["undoes"]]


def test_the_dump_tells_who_saw_what_on_which_side_and_when(desks, db, clock):
    made = desks(strengths=3)
    ann = made.person("Ann")
    made.add([{"prompt": f"q{n}", "completions": [f"x{n}", f"y{n}"]} for n in range(20)])
    for _ in range(20):
        shown = made.next(ann)
        clock.advance(1)
        made.vote(ann, shown, "right", strength=2, reason=f"saw {shown.completions[1]}")
    lines = export.dump(db, made.owner, made.project)
    assert {line["side"] for line in lines} == {"right"} and {line["choice"] for line in lines} == {"a", "b"}
    for line in lines:
        seen = line["completions"][line["display"][1]]["text"]
        assert line["reason"] == f"saw {seen}" and line["completions"]["ab".index(line["choice"])]["text"] == seen
        assert (line["rater"], line["strength"]) == ("Ann", 2)
    assert lines[0]["decided_at"] == "2027-01-15T08:00:01.000+00:00" and lines[0]["shown_at"] == "2027-01-15T08:00:00.000+00:00"


def test_two_of_three_are_a_majority_and_one_of_three_is_none(desks, db):
    made = desks(overlap=3)
    crowd = [made.person(n) for n in ("Ann", "Bob", "Cy")]
    made.add([{"prompt": "two", "completions": ["x", "y"]}, {"prompt": "none", "completions": ["x", "y"]}])
    for n, person in enumerate(crowd):
        for _ in range(2):
            shown = made.next(person)
            if n == 2:
                made.vote(person, shown, "tie")
            else:
                made.prefer(person, shown, "x" if shown.prompt == "two" or n == 0 else "y")
    found = export.preference(db, made.owner, made.project)
    assert [(row["prompt"], row["chosen"]) for row in found.rows] == [("two", "x")]
    assert found.rows[0]["lineage"]["share"] == 2 / 3 and found.left_out == Counter(split=1)


def test_the_margin_is_the_mean_strength(desks, db):
    made = desks(overlap=3, strengths=3)
    made.pairs(1)
    for name, text, strength in (("Ann", "good 0", 3), ("Bob", "good 0", 1), ("Cy", "bad 0", 2)):
        person = made.person(name)
        shown = made.next(person)
        made.vote(person, shown, ("left", "right")[shown.completions.index(text)], strength=strength)
    (row,) = export.preference(db, made.owner, made.project, margin=True).rows
    assert row["margin"] == pytest.approx((3 + 1 - 2) / 3)
    assert "margin" not in export.preference(db, made.owner, made.project).rows[0]
    plain = desks()
    with pytest.raises(Refusal, match="no margin"):
        export.preference(db, plain.owner, plain.project, margin=True)


def test_rankings_become_pairs_of_the_mean_rank(desks, db):
    made = desks(kind="ranking", overlap=2)
    made.add([{"prompt": TALK, "completions": [said(c) for c in "xyz"], "samplers": ["one", "two", "three"]}])
    for name, ranks in (("Ann", {"x": 1, "y": 2, "z": 3}), ("Bob", {"x": 1, "z": 2, "y": 3})):
        person = made.person(name)
        shown = made.next(person)
        made.vote(person, shown, ranks=tuple(ranks[c[0]["content"]] for c in shown.completions))
    found = export.preference(db, made.owner, made.project)
    pairs = {(row["chosen"][0]["content"], row["rejected"][0]["content"]) for row in found.rows}
    assert pairs == {("x", "y"), ("x", "z")} and found.left_out == Counter(tie=1)
    assert all(row["lineage"]["chosen"][0]["sampler"] == "one" for row in found.rows)
    each = export.preference(db, made.owner, made.project, "each")
    assert len(each.rows) == 6 and not each.left_out
    labels = {row["completion"][0]["content"]: row["label"] for row in export.unpaired(db, made.owner, made.project).rows}
    assert labels == {"x": True, "y": False, "z": False}


@pytest.mark.parametrize("kind, top", [("rating-5", 5), ("rating-10", 10)])
def test_ratings_become_pairs_and_labels(desks, db, kind, top):
    made = desks(kind=kind, overlap=2)
    made.add([{"prompt": "p", "completions": ["x", "y", "z", "w"]}, {"prompt": "alone", "completion": "x"}])
    ratings = {"Ann": {"x": top, "y": 1, "z": 1, "w": 3}, "Bob": {"x": top - 1, "y": 1, "z": 1, "w": 3}}
    for name, given in ratings.items():
        person = made.person(name)
        while (shown := made.next(person)) is not None:
            made.vote(person, shown, rating=given[shown.completions[0]])
    found = export.preference(db, made.owner, made.project, margin=True)
    expected = {("x", "y"): top - 1.5, ("x", "z"): top - 1.5, ("x", "w"): top - 3.5, ("w", "y"): 2.0, ("w", "z"): 2.0}
    assert {(row["chosen"], row["rejected"]): row["margin"] for row in found.rows} == expected
    assert found.left_out == Counter(tie=1, alone=1)
    thumbs = export.unpaired(db, made.owner, made.project)
    of_p = {row["completion"]: row["label"] for row in thumbs.rows if row["prompt"] == "p"}
    assert of_p == {"x": True, "y": False, "z": False} | ({} if top == 5 else {"w": False})
    assert thumbs.left_out == (Counter(middle=1) if top == 5 else Counter())


def test_rows_are_what_psigrad_and_trl_read(labelled, db, tmp_path):
    for rows, form in (
        (export.preference(db, labelled.owner, labelled.project, "each").rows, "preference"),
        (export.unpaired(db, labelled.owner, labelled.project).rows, "unpaired-preference"),
    ):
        path = tmp_path / f"{form}.jsonl"
        export.write(path, rows)
        again = [json.loads(line) for line in path.read_text().splitlines()]
        assert again == rows
        for n, row in enumerate(again):
            checked = validate(row, form, f"{path}:{n}")
            assert set(checked.columns) == {"level", "lineage"}
        for table in (Dataset.from_list(rows), Dataset.from_json(str(path), cache_dir=str(tmp_path / "cache"))):
            assert table.to_list() == rows


def test_conversations_go_through_trls_own_functions(desks, db):
    from trl.data_utils import is_conversational, unpair_preference_dataset

    made = desks()
    made.add([{"prompt": TALK, "completions": [said("x"), said("y")]}])
    shown = made.next(made.owner)
    made.prefer(made.owner, shown, said("y"))
    table = Dataset.from_list(export.preference(db, made.owner, made.project).rows)
    assert is_conversational(table[0])
    assert (table[0]["chosen"], table[0]["rejected"]) == (said("y"), said("x"))
    theirs = unpair_preference_dataset(table.remove_columns("lineage")).to_list()
    ours = [{k: row[k] for k in ("prompt", "completion", "label")} for row in export.unpaired(db, made.owner, made.project).rows]
    assert sorted(map(str, map(sorted_row, theirs))) == sorted(map(str, map(sorted_row, ours)))


def test_what_was_exported_can_be_brought_in_again(labelled, desks, db, tmp_path):
    rows = export.preference(db, labelled.owner, labelled.project, "each").rows
    export.write(tmp_path / "pairs.jsonl", rows)
    again = desks(overlap=1)
    added = intake.add_file(db, again.owner, again.project, tmp_path / "pairs.jsonl", intake.TaskOptions(gold=True))
    assert (added.prompts, added.tasks) == (2, 2)


def test_odd_texts_survive_the_way_out(desks, db, tmp_path):
    made = desks()
    odd = "nul \0 lone \ud800 line \u2028 \x85 end"
    made.add([{"prompt": odd, "completions": [odd + "1", odd + "2"]}])
    made.vote(made.owner, made.next(made.owner), "left", reason=odd)
    rows = export.preference(db, made.owner, made.project).rows
    export.write(tmp_path / "odd.jsonl", rows)
    with pytest.raises(UserError, match=r"odd\.jsonl exists"):
        export.write(tmp_path / "odd.jsonl", rows)
    assert [json.loads(line) for line in (tmp_path / "odd.jsonl").read_text().split("\n") if line] == rows
    export.write(tmp_path / "dump.jsonl", export.dump(db, made.owner, made.project))
    assert json.loads((tmp_path / "dump.jsonl").read_text())["reason"] == odd


def test_columns_are_the_same_in_every_row(desks, db):
    made = desks()
    made.add([{"prompt": "p", "completions": ["x", "y"], "level": 1}, {"prompt": "q", "completions": ["x", "y"], "topic": "t"}])
    while (shown := made.next(made.owner)) is not None:
        made.vote(made.owner, shown, "left")
    rows = export.preference(db, made.owner, made.project).rows
    assert [list(row) for row in rows] == [["prompt", "level", "chosen", "rejected", "topic", "lineage"]] * 2
    assert Dataset.from_list(rows)["topic"][:] == [None, "t"]


def test_an_empty_project_exports_nothing(desks, db):
    made = desks()
    for call in (export.preference, export.unpaired):
        found = call(db, made.owner, made.project)
        assert found.rows == [] and not found.left_out
    assert export.dump(db, made.owner, made.project) == []
    with pytest.raises(Refusal, match="majority or each"):
        export.preference(db, made.owner, made.project, "most")
