"""A judge beside people's votes and beside itself, with a judge that a function plays: every figure by hand."""

from __future__ import annotations

import json
import math
from collections import Counter

import pytest
from stand_in_server import chat, standing_in

from psigrad.cli import main
from psigrad.errors import UserError
from psigrad_extras.judges.group_ranking import GroupRanking
from psigrad_studio.judge_report import read_votes, report, votes_of


class Played(GroupRanking):
    """A judge whose verdict on a pair stands in its texts: the one with "+" is better, and with "?" the one shown first."""

    def ask(self, question, read):
        shown = question.split("\nAnswer A:")[1]
        first, second = shown.split("\nAnswer B:")
        lines = []
        for name in self.criteria:
            mark = "+" if name == "quality" else name[0]
            better = "A = B" if (mark in first) == (mark in second) else "A > B" if mark in first else "B > A"
            lines.append(f"{name}: {'A > B' if '?' in first else better}")
        return read("\n".join(lines))


def preferred(n, chosen, rejected, **more):
    return [{"prompt": f"p{more} {i}", "chosen": chosen, "rejected": rejected, **more} for i in range(n)]


def figures(found):
    return {row["name"]: row for row in found.rows}


def test_agreement_and_kappa_by_hand():
    """Votes for "x" and for "y" as in the textbook's table: 20 and 15 agreed, 10 and 5 not. p_o = 0.7; people say x 25 times of
    50 and the judge 30 times, so p_e = 0.5·0.6 + 0.5·0.4 = 0.5 and κ = 0.4.
    """
    rows = (preferred(20, "a+", "b", of=1) + preferred(5, "a", "b+", of=2)
            + preferred(15, "b+", "a", of=3) + preferred(10, "b", "a+", of=4))  # fmt: skip
    found = figures(report(Played(model="j"), rows))
    agreement, kappa = found["agreement, all criteria"], found["kappa, all criteria"]
    assert agreement["value"] == pytest.approx(0.7) and agreement["unit"] == "of 50 pairs"
    # Wilson at z = 1.96: (0.7 + 1.9208/50 ± 1.96·√(0.0042 + 3.8416/10000)) / (1 + 3.8416/50)
    assert (agreement["low"], agreement["high"]) == pytest.approx((0.5625, 0.8090), abs=1e-4)
    assert kappa["value"] == pytest.approx(0.4)
    reach = 1.959964 * math.sqrt(0.7 * 0.3 / (50 * 0.5**2))
    assert (kappa["low"], kappa["high"]) == pytest.approx((0.4 - reach, 0.4 + reach))


def test_a_judge_that_is_swayed_by_order_is_found_out():
    rows = preferred(6, "a+", "b", of=1) + preferred(4, "a?", "b?", of=2)
    found = figures(report(Played(model="j"), rows))
    assert found["the same in both orders"]["value"] == pytest.approx(0.6)
    # of the 20 verdicts 6 of the first 12 were for what was shown first, and all of the other 8
    assert found["prefers what is shown first"]["value"] == pytest.approx(14 / 20)
    assert found["agreement, all criteria"]["value"] == pytest.approx(0.6), "a verdict that the order makes is a tie"


def test_length_and_its_own_texts():
    def one(n, chosen, rejected, mine, theirs):
        origin = lambda model: [{"model": model}]  # noqa: E731
        return preferred(n, chosen, rejected, lineage={"chosen": origin(mine), "rejected": origin(theirs)})

    rows = one(3, "aaaa+", "b", "j", "k") + one(1, "a", "bbbb+", "k", "j") + one(2, "a+", "bbb", "k", "k")
    found = figures(report(Played(model="j"), rows))
    assert found["judge prefers the longer"]["value"] == pytest.approx(4 / 6)
    assert found["people prefer the longer"]["value"] == pytest.approx(3 / 6)
    assert found["judge prefers j's own"]["value"] == 1.0 and found["judge prefers j's own"]["unit"] == "of 4 choices"
    assert found["people prefer j's own"]["value"] == pytest.approx(3 / 4)


def test_each_criterion_is_held_against_its_own_votes():
    rows = (preferred(3, "a+", "b", criterion="quality") + preferred(2, "aw", "b+", criterion="wit")
            + preferred(2, "a", "bw", criterion="wit"))  # fmt: skip
    found = figures(report(Played(model="j", criteria={"quality": 1, "wit": 1}), rows))
    assert found["agreement, quality"]["value"] == 1.0 and found["agreement, quality"]["unit"] == "of 3 pairs"
    assert found["agreement, wit"]["value"] == pytest.approx(0.5) and found["agreement, wit"]["unit"] == "of 4 pairs"
    assert "agreement, all criteria" not in found, "no vote was on the whole"


def test_the_slope_by_hand():
    """With one pair won of two at a difference of 1, and a made-up vote each way, σ(b) = 1/2; with 9 of 10, σ(b) = 10/12."""
    even = report(Played(model="j"), preferred(1, "a+", "b", of=1) + preferred(1, "a", "b+", of=2))
    assert even.slope == pytest.approx(0.0, abs=1e-3)
    most = report(Played(model="j"), preferred(9, "a+", "b", of=1) + preferred(1, "a", "b+", of=2))
    assert most.slope == pytest.approx(math.log(10 / 2), abs=1e-3)


def test_votes_as_they_were_given():
    vote = {"prompt": "p", "completions": [{"text": "a", "origins": [{"model": "m"}]}, {"text": "b", "origins": []}],
            "action": "vote", "stands": True, "ranks": None, "rating": None}  # fmt: skip
    ranked = {**vote, "prompt": "q", "choice": None, "completions": ["x", "y", "z"], "ranks": [1, 2, 2]}
    rows = [
        {**vote, "choice": "a"}, {**vote, "choice": "a"}, {**vote, "choice": "tie"},
        {**vote, "choice": "b", "completions": vote["completions"][::-1]},  # the first once more, from the other side
        {**vote, "choice": "b", "stands": False}, {**vote, "choice": None, "action": "skip"}, ranked,
        {**vote, "choice": None, "rating": 3, "completions": vote["completions"][:1]},
    ]  # fmt: skip
    left_out = Counter()
    pair, *others = read_votes(rows, left_out)
    assert (pair.texts, pair.votes, pair.human, pair.models) == (("a", "b"), [1, 1, 0, 1], 1, ("m", ""))
    assert [(u.texts, u.human) for u in others] == [(("x", "y"), 1), (("x", "z"), 1), (("y", "z"), 0)]
    assert left_out == {"skipped or undone": 2, "no comparison": 1}


def test_the_aspects_of_a_vote_are_held_against_the_criteria_of_their_names():
    vote = {"prompt": "p", "completions": [{"text": "aw"}, {"text": "b+"}], "action": "vote", "stands": True, "choice": "b",
            "answers": {"quality": {"kind": "scale", "value": [2, 4]}, "wit": {"kind": "better", "value": "a", "strength": 2},
                        "tone": {"kind": "better", "value": "tie"}, "note": {"kind": "text", "value": "a"}}}  # fmt: skip
    calls = []

    class Counted(Played):
        def rank(self, prompt, texts):
            calls.append(texts)
            return super().rank(prompt, texts)

    found = report(Counted(model="j", criteria={"quality": 1, "wit": 1}), [vote, {**vote, "prompt": "q"}])
    of = figures(found)
    assert of["agreement, quality"]["value"] == of["agreement, wit"]["value"] == 1.0
    assert of["agreement, quality"]["unit"] == of["agreement, all criteria"]["unit"] == "of 2 pairs"
    assert found.pairs == len(calls) == 2, "a pair is shown to the judge once, however many aspects people judged"
    assert found.left_out == {"other questions": 2}  # tone; a text that happens to be "a" is no vote


def test_split_votes_are_left_out_and_people_are_compared_with_each_other():
    rows = [*preferred(1, "a+", "b"), *preferred(1, "b", "a+")]
    rows += preferred(2, "c+", "d", of=1) * 2
    found = report(Played(model="j"), rows)
    assert found.left_out == {"split votes": 1} and found.pairs == 2
    assert figures(found)["people agree with each other"]["value"] == 1.0
    with pytest.raises(UserError, match="The judge ranked no pair"):
        report(Played(model="j"), rows[:2])


def test_attention_checks_are_no_votes(tmp_path):
    from psigrad_studio.labels import assignments, database, intake, people, projects
    from psigrad_studio.labels.assignments import LabelAnswer
    from psigrad_studio.labels.intake import TaskOptions
    from psigrad_studio.labels.projects import ProjectSettings

    db = database.connect(tmp_path / "labels.db")
    me = people.local(db)
    for name, checks in (("planted", 50), ("ordinary", 0)):
        project = projects.create(db, me, ProjectSettings(name, checks=checks))
        intake.add_rows(db, me, project, [{"prompt": "p", "chosen": "a", "rejected": "b"}], TaskOptions(gold=True))
        shown = assignments.next_task(db, me, project)
        assignments.vote(db, me, shown.assignment, LabelAnswer(choice="left"), f"a key of {name}")
    left_out = Counter()
    assert read_votes(votes_of(str(tmp_path / "labels.db"), "planted"), left_out) == []
    assert left_out == {"attention checks": 1}
    (unit,) = read_votes(votes_of(str(tmp_path / "labels.db"), "ordinary"), left_out)
    assert len(unit.votes) == 1 and left_out == {"attention checks": 1}


def test_the_desks_database_and_the_command(tmp_path, capsys):
    from psigrad_studio.labels import database, intake, people, projects
    from psigrad_studio.labels.projects import ProjectSettings

    db = database.connect(tmp_path / "labels.db")
    me = people.local(db)
    project = projects.create(db, me, ProjectSettings("taste", instructions="Which is better?"))
    intake.add_pair(db, me, project, "p", {"completion": "a+"}, {"completion": "b"})
    assert votes_of(str(tmp_path / "labels.db"), "taste") == []
    with pytest.raises(UserError, match="does not exist; give the labels"):
        votes_of(str(tmp_path / "label.db"), "taste")
    with pytest.raises(UserError, match="no project 'tast'; expected one of taste"):
        votes_of(str(tmp_path / "labels.db"), "tast")
    file = tmp_path / "votes.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in preferred(3, "a+", "b")))

    def reply(n, body):
        first = body["messages"][0]["content"].split("Answer B:")[0]
        return chat("quality: A > B" if "\na+\n" in first else "quality: B > A")

    with standing_in(reply) as (url, seen):
        output = tmp_path / "report.json"
        asked = ["judge-report", str(file), "--model", "j", "--base-url", f"{url}/v1", "--output", str(output)]
        assert main(asked) == 0
    out = capsys.readouterr().out
    assert "agreement, all criteria" in out and "With fewer than 10 pairs" in out and "slope: " in out and len(seen) == 6
    assert json.loads(output.read_text())["pairs"] == 3
    assert main(["judge-report", str(file), "--model", "j"]) == 2
    assert "no judge was given" in capsys.readouterr().err
    assert main(["judge-report", str(tmp_path / "none"), "--model", "j", "--base-url", "http://x"]) == 2
    assert "is not a JSONL file of votes" in capsys.readouterr().err
