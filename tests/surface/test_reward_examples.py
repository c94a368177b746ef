"""Each built-in reward gives what the tables of docs/reward_examples.md say. The page's rows were worked out by hand."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from psigrad.language.rewards import builtin
from psigrad.language.rewards.code import same_output
from psigrad.language.rewards.code_asserts import take_apart
from psigrad_extras.connect.endpoint import NoAnswerError
from psigrad_extras.judges.instructions import KINDS, IFEval
from psigrad_extras.judges.rubric import score_in

PAGE = (Path(__file__).parents[2] / "docs" / "reward_examples.md").read_text()
EXAMPLES = PAGE.partition("<!-- examples")[2].partition("<!-- end of examples")[0]
METADATA = {"calendar_arithmetic": {"task": "is_leap_year"}, "countdown": {"numbers": [6, 7], "target": 42}}


def cell(text: str) -> str:
    """Return the text that a cell stands for: `code`, `` code with ` `` or “words”, with ⏎ for a line break."""
    text = text.strip()
    if text.startswith("`` "):
        text = text[3:-3]
    elif text[:1] in ("`", "“"):
        text = text[1:-1]
    return text.replace("⏎", "\n").replace("\\|", "|")


def section_of(name: str) -> str:
    """Return what the page says of a reward."""
    (section,) = re.findall(rf"^\*\*`{name}`.*?(?=^\*\*`|\Z)", EXAMPLES, re.MULTILINE | re.DOTALL)
    return section


def rows_of(name: str) -> list[list[str]]:
    """Return the rows of all tables of a reward, without their heads."""
    tables = re.findall(r"^\|.*\n\|---.*\n((?:\|.*\n)*)", section_of(name), re.MULTILINE)
    return [[cell(one) for one in re.split(r"(?<!\\)\|", row)[1:-1]] for table in tables for row in table.splitlines()]


def score(name: str, *pairs: tuple[str, str], **columns: object) -> list[float | None]:
    """Return the rewards of (answer, completion) pairs."""
    return builtin.NAMES[name](completions=[text for _, text in pairs], answer=[gold for gold, _ in pairs], **columns)


def check(name: str, rows: list[list[str]]) -> None:
    """Check that the first completion of each row (answer, completion, completion) is rewarded, and the second is not."""
    assert score(name, *[(gold, right) for gold, right, _ in rows]) == [1.0] * len(rows)
    assert score(name, *[(gold, wrong) for gold, _, wrong in rows]) == [0.0] * len(rows)


@pytest.mark.parametrize("name", ["exact", "numeric", "math", "format", "choice"])
def test_answers_are_compared_as_the_page_says(name):
    rows = [["", *row] if name == "format" else row for row in rows_of(name)]
    assert len(rows) >= 5
    check(name, rows)
    with pytest.raises(AssertionError):  # negative control
        check(name, [[rows[0][0], rows[0][2], rows[0][2]]])
    refusals = re.findall(
        r"A dataset with an answer that the reward cannot parse stops the run. Examples: (.*)\.", section_of(name)
    )
    assert len(refusals) == (name in ("numeric", "math"))
    for refused in refusals:
        golds = re.findall(r"`([^`]*)`", refused)
        assert len(golds) == 5 and score(name, *zip(golds, golds, strict=True)) == [None] * 5


def passes(test: str, value: str) -> bool:
    """Return True if a test of `code` passes for a program whose f(7) is this value."""
    try:
        return bool(take_apart(test)[0][0].judge(ast.literal_eval(value)))
    except (TypeError, ValueError, LookupError):  # a value of the wrong kind
        return False


def test_programs_are_judged_as_the_page_says():
    rows = rows_of("code")
    tests = [row for row in rows if row[0].startswith("assert")]
    assert len(tests) == len(rows) - len(tests) == 10
    assert all(passes(test, right) and not passes(test, wrong) for test, right, wrong in tests)
    printed = [row for row in rows if row not in tests]
    assert all(same_output(right, text) and not same_output(wrong, text) for text, right, wrong in printed)


def judge(reply: str) -> str:
    """Return what `rubric` makes of a judge's reply."""
    try:
        return f"{score_in(reply, 5) / 5:.4g}"
    except NoAnswerError:
        return "unscored"


def test_part_marks_are_those_of_the_page():
    replies = rows_of("rubric")
    assert len(replies) == 7 and all(judge(reply) == reward for reply, reward in replies)
    for task, gold, text, reward in rows_of("reasoning_gym"):
        (found,) = score("reasoning_gym", (gold, text), task=[task], metadata=[METADATA.get(task, {})])
        assert f"{float(found or 0):.4g}" == reward, (task, text)
    for gold, text, reward in rows_of("similarity"):
        assert f"{score('similarity', (gold, text))[0]:.4g}" == reward, (gold, text)
    lengths = [int(n) for n in re.search(r"^\| tokens \|(.*)\|$", EXAMPLES, re.MULTILINE)[1].split("|")]
    for name, *costs in rows_of("length"):
        found = builtin.NAMES[name](completions=[""] * len(lengths), completion_ids=[[0] * n for n in lengths])
        assert [f"{cost:.4g}" for cost in found] == costs, name


def test_instructions_are_verified_as_the_page_says():
    rows = rows_of("ifeval")
    without = re.findall(r"`(\w+:\w+)`", section_of("ifeval").partition("\n")[0])  # they need another package
    assert len(without) == 3 and {kind for kind, *_ in rows} | {*without} == set(KINDS)
    for kind, parameters, *texts in rows:
        pairs = re.findall(r"(\w+) ('[^']*'|\[[^]]*\]|\d+)", parameters)
        given = {name: ast.literal_eval(value) for name, value in pairs}
        assert IFEval()(texts, instruction_id_list=[[kind]] * 2, kwargs=[[given]] * 2) == [1.0, 0.0], kind
