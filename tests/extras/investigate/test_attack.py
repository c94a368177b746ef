"""psigrad score --attack: what should fail and does not, what should pass and does not, before the first step."""

from __future__ import annotations

import json

import pytest
from flawed_rewards import any_number, bag_of_words, begins_with, believes, cut_to_first, repeats

from psigrad import cli
from psigrad.errors import UserError
from psigrad_extras.investigate.attack import attack, report, right_answers, wrong_answers

ROWS = [
    {"prompt": "What is 6 times 7?", "answer": "42"},
    {"prompt": "Solve it.", "answer": "1, 2, 3"},
    {"prompt": "Simplify the root of 12.", "answer": "2\\sqrt{3}"},
    {"prompt": "He has 5 and spends 3.", "answer": "He keeps 5-3=<<5-3=2>>2.\n#### 2"},
    {"prompt": "How many?", "answer": "1,234,567"},
    {"prompt": "What share?", "answer": "50\\%"},
    {"prompt": "Half of one?", "answer": "\\frac{1}{2}"},
    {"prompt": "Which day?", "answer": "\\text{Monday}"},
    {"prompt": "When?", "answer": "12:30"},
    {"prompt": "How long?", "answer": "5\\text{ cm}"},
    {"prompt": "Which one?", "answer": "B"},
    {"prompt": "Which numbers?", "answer": "(-\\infty, 2) \\cup (3, \\infty)"},
    {"prompt": "Which colours, in order?", "answer": "red green blue"},
]


def misjudged(found):
    return {(one.right, one.form) for one in found if one.misjudged}


def test_math_stands_and_every_row_is_tried():
    found = attack(["math"], ROWS, timeout=60.0)
    assert misjudged(found) == set() and {one.reward for one in found} == {0.0, 1.0}
    assert {one.source for one in found} == {f"rows:{i}" for i in range(1, len(ROWS) + 1)}
    assert report(found).splitlines()[-1].endswith("0 wrong ones are rewarded and 0 right ones are not.")


@pytest.mark.parametrize(
    ("reward", "holes"),
    [
        (cut_to_first, {"its first number"}),
        pytest.param(believes, {"a judge's words", "all choices"}, marks=pytest.mark.slow),
        pytest.param(bag_of_words, {"its words in another order"}, marks=pytest.mark.slow),
        pytest.param(begins_with, {"empty"}, marks=pytest.mark.slow),
        (repeats, {"the prompt"}),
        pytest.param(any_number, {"all numbers"}, marks=pytest.mark.slow),
        ("format", {"format without content", "another row's answer"}),
        ("exact", set()),
    ],
)
def test_each_kind_of_hole_is_found(reward, holes):
    found = {form for right, form in misjudged(attack([reward], ROWS)) if not right}
    assert holes <= found and (holes or not found)


def test_all_numbers_have_the_gold_among_them_and_not_at_the_end():
    """By hand: 42 and the seven digits are numbers that were asked for; 100 alone moves the end of the list."""
    found = attack([any_number], [ROWS[0], ROWS[4], {"prompt": "All of it?", "answer": "100"}])
    assert [(one.source, one.misjudged) for one in found if one.form == "all numbers"] == [
        ("rows:1", True),
        ("rows:2", True),
        ("rows:3", True),
    ]
    assert all(one.text.split(", ")[-1] not in ("42", "1,234,567") for one in found if one.form == "all numbers")


def test_what_a_strict_reward_misses_is_no_hole():
    found = attack(["exact"], ROWS[:1])
    assert misjudged(found) == {(True, one.form) for one in found if one.right and one.form != "as it is"}
    assert "x boxed                        1 of 1 misjudged: rows:1 'So it is \\\\boxed{42}.' got 0" in report(found)


def test_of_several_rewards_the_sum_is_judged():
    """By hand: a bare answer gets 1 of 2, an empty form the same 1, so that format alone must not weigh as much."""
    assert (False, "format without content") not in misjudged(attack(["numeric", "format"], ROWS[:1], weights=[1.0, 0.5]))
    assert (False, "format without content") in misjudged(attack(["numeric", "format"], ROWS[:1], weights=[0.5, 1.0]))


def test_the_answers_are_these():
    wrong, right = list(wrong_answers("q", "1,234", "7")), list(right_answers("1,234"))
    assert ("its first number", "1") in wrong and ("another row's answer", "7") in wrong
    assert ("its first number", "2") in list(wrong_answers("q", "2\\sqrt{3}", ""))
    assert "its first number" not in dict(wrong_answers("q", "5\\text{ cm}", "")), "a unit may be left out"
    assert ("another form of the number", "1{,}234") in right and ("boxed", "So it is \\boxed{1,234}.") in right
    assert dict(right_answers("def f():\n    return 1\n"))["fenced"].count("```") == 2


def test_the_command_says_what_is_wrong_and_its_status_is_1_for_a_hole(tmp_path, capsys):
    path, output = tmp_path / "rows.jsonl", tmp_path / "tried.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS[:3]))
    common = ["score", "--attack", "--dataset", str(path), "--max-rows", "2"]
    assert cli.main([*common, "--reward", "exact"]) == 0
    assert "0 wrong ones are rewarded" in capsys.readouterr().out
    assert cli.main([*common, "--reward", "format", "--output", str(output)]) == 1
    assert "x format without content" in capsys.readouterr().out
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert {row["source"].rpartition("/")[2] for row in rows} == {"rows.jsonl:1", "rows.jsonl:2"}
    assert {"form", "right", "text", "reward", "misjudged", "reason"} <= rows[0].keys()


def test_rows_that_a_reward_cannot_read_are_named(tmp_path):
    found = attack(["numeric"], [ROWS[0], ROWS[2]])
    assert "1 row has answers without a reward. At rows:2: numeric: the answer" in report(found)
    with pytest.raises(UserError, match=r"No answer was scored .rows:1: numeric: the answer"):
        attack(["numeric"], [ROWS[2]])
