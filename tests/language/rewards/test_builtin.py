"""The built-in rewards against cases worked out by hand."""

from __future__ import annotations

import itertools
import json
import random
import time

import numpy as np
import pytest
import reasoning_gym
from cases import repeat_for

from psigrad.errors import UserError
from psigrad.language.data import tasks
from psigrad.language.rewards import builtin


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        ("42", "42", 1),
        ("  42\n", "42", 1),
        ("42", " 42 ", 1),
        ("42", 42, 1),
        ("42.", "42", 0),
        ("the 42", "42", 0),
        ("", "", None),
        ("None", None, None),
        ([{"role": "assistant", "content": "42 "}], "42", 1),
        ([{"role": "assistant", "content": None}], "42", 0),
    ],
)
def test_exact(completion, answer, reward):
    assert builtin.exact([completion], [answer]) == [reward]


COMPOSED, DECOMPOSED = "caf\u00e9", "cafe\u0301"


@pytest.mark.parametrize("name", ["exact", "similarity", "math", "numeric", "choice"])
@pytest.mark.parametrize(
    ("completion", "answer", "reward", "of"),
    [
        ("5", 5.0, 1, "exact similarity math numeric"),
        ("5.0", 5.0, 1, "exact similarity math numeric"),
        ("6", 5.0, 0, "exact similarity math numeric"),
        ("true", True, 1, "exact similarity math"),
        ("True", True, 1, "exact similarity math"),
        ("false", True, 0, "exact math"),
        ("five", ["5", "five"], 1, "exact similarity math"),
        ("6", ["5", "6"], 1, "exact similarity math numeric"),
        ("7", ["5", "6"], 0, "exact similarity math numeric"),
        ("['5', '6']", ["5", "6"], 0, "exact"),
        ("6", [5, 6.0, None], 1, "exact similarity math numeric"),
        ("6", np.array([5.0, 6.0]), 1, "exact similarity math numeric"),
        ("B", ["A", 1], 1, "choice"),
        ("C", ["A", "B"], 0, "choice"),
        ("1e-7", 1e-07, 1, "exact similarity math numeric"),
        ("0.0000001", 1e-07, 1, "exact similarity math numeric"),
        ("2", 2.5, 0, "exact math numeric"),
        ("C", 2.0, 1, "choice"),
        (COMPOSED, DECOMPOSED, 1, "exact similarity math"),
        (DECOMPOSED, COMPOSED, 1, "exact similarity math"),
        ("cafe", COMPOSED, 0, "exact math"),
        ("5\u00a0km", "5 km", 1, "exact similarity math"),
        ("5 km", "5\u202fkm", 1, "exact similarity math"),
        ("5km", "5 km", 0, "exact"),
        ("x", [], None, "exact similarity math numeric choice"),
        ("x", " ", None, "exact similarity math numeric choice"),
    ],
)  # fmt: skip
def test_golds_that_are_no_plain_text(name, completion, answer, reward, of):
    if name in of.split():
        function = builtin.find_reward(name)
        function.check_row({"answer": answer})
        assert function([completion], answer=[answer]) == [reward]


@pytest.mark.parametrize("name", ["exact", "similarity", "math", "numeric", "choice"])
@pytest.mark.parametrize("answer", [{"value": "5"}, [["5"], ["6"]], [{"value": "5"}], b"5"])
def test_golds_that_are_no_answer_are_refused(name, answer):
    with pytest.raises(UserError, match="the answer"):
        builtin.find_reward(name).check_row({"answer": answer})


@repeat_for(
    ("completion", "answer", "reward"),
    [
        ("The answer is 42.", "42", 1),
        ("first 41, then 42", "42", 1),
        ("first 42, then 41", "42", 0),
        ("1,234,567", "1234567", 1),
        ("$1,234.50", "1234.5", 1),
        ("pairs: 1,2345", "2345", 1),
        ("12,34", "34", 1),
        ("-3.5", "-3.5", 1),
        ("\u22123.5", "-3.5", 1),
        ("= -3", "-3", 1),
        ("7-5", "5", 1),
        ("pages 3-5", "5", 1),
        ("(2)-5", "5", 1),
        ("+5", "5", 1),
        (".5", "0.5", 1),
        ("5.", "5", 1),
        ("6.02e23", "6.02E+23", 1),
        ("1e-3", "0.001", 1),
        ("e5", "5", 1),
        ("no number", "5", 0),
        ("", "5", 0),
        ("5", "no number", None),
        ("5", None, None),
        ("1e999", "1e999", None),
        ("1e999", "5", 0),
        ("-$5", "-5", 1),
        ("it is -$5.", "-\\$5", 1),
        ("$-5$", "-5", 1),
        ("-$5", "5", 0),
        ("it costs 5 €", "€5", 1),
        ("1{,}000", "1\\,000", 1),
        ("10 000", "10,000", 1),
        ("1,00,000", "100000", 1),
        ("1", "1{,}000", 0),
        ("\\frac{3}{2}", "\\frac{1}{2}", 0),
        ("\\boxed{\\frac12}", "1/2", 1),
        ("1 1/2", "1\\frac{1}{2}", 1),
        ("1\N{VULGAR FRACTION ONE HALF}", "1.5", 1),
        ("1/2", "1 1/2", 0),
        ("1000000", "10^{6}", 1),
        ("6", "10^6", 0),
        ("10^6", "6", 0),
        ("6.02 \\times 10^{23}", "6.02e23", 1),
        ("at 12:30", "12:30", 1),
        ("1:30", "12:30", 0),
        ("30", "12:30", 0),
        ("12.5", "12:30", 0),
        ("50 percent", "50%", 1),
        ("0.5", "50%", 1),
        ("50", "50%", 1),
        ("50%", "50", 1),
        ("0.5%", "50%", 0),
        ("5", "50%", 0),
        ("2\\sqrt{3}", "3", 0),
        ("2\\pi", "2", 0),
        ("x^2", "2", 0),
        ("\\boxed{5}, since 2 + 3 = 5 and not 7", "5", 1),
        ("\\boxed{2\\sqrt{5}}", "5", 0),
        ("\\boxed{x = 5}", "5", 1),
        ("\\boxed{5\\text{ cm}}", "5", 1),
        ("<think>7</think><answer>It is 5.</answer>", "5", 1),
        ("1", "2\\sqrt{3}", None),
        ("3", "1, 2, 3", None),
        ("5", "5 apples", None),
        ("5", "x = 5", None),
        ("34", "12,34", None),
        ("7006653", "7006652", 0),
        ("7006652", "7006652", 1),
        ("7006652.0", "7006652", 1),
        ("0.3333333", "1/3", 1),
        ("0.333", "1/3", 0),
        ("0.0000001", "0.0000002", 0),
        ("2" * 500, "2" * 500, None),
        ("1/3", "0.\\overline{3}", 1),
        ("0.1\\overline{6}", "1/6", 1),
        ("-4/11", "-0.\\overline{36}", 1),
        ("0.3", "0.\\overline{3}", 0),
        ("5", "Natalia sold 48/2 = <<48/2=24>>24 clips.\n#### 5", 1),
        ("1000000.5", "1000000", 0),
        ("1000002", "1000000", 0),
        ("0.0000005", "0", 0),
        ("0.00001", "0", 0),
        ("It is -\N{VULGAR FRACTION ONE HALF}.", "-1/2", 1),
        ("It is -\N{VULGAR FRACTION ONE HALF}.", "1/2", 0),
        ("2 \N{VULGAR FRACTION ONE HALF}", "2.5", 1),
        ("It is \N{EN DASH}5.", "-5", 1),
        ("It is \N{EN DASH}5.", "5", 0),
        ("pages 3\N{EN DASH}5", "5", 1),
        ("so 90^\\circ", "90", 1),
        ("\\boxed{90^{\\circ}}", "90", 1),
        ("The answer is __72__.", "72", 1),
        ("_72_", "72", 1),
        ("**_72_**", "72", 1),
        ("____72____", "72", 1),
        ("_-72_", "-72", 1),
        ("_-72_", "72", 0),
        ("_3/4_", "3/4", 1),
        ("_3/4_", "4", 0),
        ("#### **72**", "72", 1),
        ("x_72", "72", 0),
        ("x_{72}", "72", 0),
        ("a _{72} b _{72}", "72", 0),
        ("2**3", "8", 1),
    ],
)
def test_numeric(completion, answer, reward):
    assert builtin.Numeric()([completion], [answer]) == [reward]


def test_numeric_is_quick_on_a_megabyte_of_digits():
    begin = time.process_time()
    assert builtin.Numeric()(["1" * 1_000_000, "1,111" * 200_000, "-" * 1_000_000, "e5 " * 300_000], ["5"] * 4) == [0, 0, 0, 1]
    assert time.process_time() - begin < 5.0


@pytest.mark.parametrize(
    "text",
    [
        *("$", "answer is ", "$1$ ", "\\boxed{", "<answer>", "{", "the ", "\\frac{", "1,11", "1:", "\\( a ", "\\["),
        *("_", "*", "_a", " _a", "**a ", "*_", "__a_"),
    ],
)
def test_math_and_numeric_are_quick_on_long_text(text):
    begin = time.process_time()
    long = text * (300_000 // len(text))
    builtin.math([long], ["5"]), builtin.Numeric()([long], ["5"])
    assert time.process_time() - begin < 3.0


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("<think>a</think>junk<think>b</think><answer>1</answer>junk<answer>2</answer>", 0),
        ("<think>a</think><think>b</think><answer>1</answer>", 0),
        ("<think>a</think><answer>1</answer><answer>2</answer>", 0),
        ("<think>a<answer>0</answer></think><answer>1</answer>", 0),
        ("<think><think>a</think></think><answer>1</answer>", 0),
        ("<think>a</think><answer>1</think></answer>", 0),
        ("<think>a</think> so <answer>1</answer>", 0),
        ("<answer>1</answer><think>a</think>", 0),
        ("<think>x < 3 and <b>bold</b></think><answer>1</answer>", 1),
        ("<think>a\nb</think>\n<answer>4</answer>", 1),
        ("  <think></think><answer></answer>\n", 1),
        ("<think>a</think> <answer>4</answer> and more", 0),
        ("<answer>4</answer>", 0),
        ("<think>a <answer>4</answer>", 0),
        ("", 0),
    ],
)
def test_format(completion, reward):
    assert builtin.Format()([completion]) == [reward]


def test_format_takes_any_pattern():
    assert builtin.Format(r"\d+")(["12", "12a"]) == [1, 0]


@pytest.mark.parametrize(
    "task",
    ["chain_sum", "simple_equations", "countdown", "word_sorting", "rearc", pytest.param("arc_agi", marks=pytest.mark.slow)],
)
def test_reasoning_gym_is_the_datasets_own_score(task):
    """Also of rows that a file has stored, which knows no tuples."""
    rows = tasks.generate(task, 4, seed=3)
    dataset = reasoning_gym.create_dataset(task, size=4, seed=3)
    entries = list(dataset)
    columns = json.loads(json.dumps({name: [row[name] for row in rows] for name in ("task", "answer", "metadata")}))
    for said in ([str(e["answer"]) for e in entries], ["wrong"] * 4, [""] * 4):
        expected = [dataset.score_answer(text, entry) for text, entry in zip(said, entries, strict=True)]
        assert builtin.reasoning_gym([f" {text}\n" for text in said], **columns) == expected
    right = builtin.reasoning_gym([str(e["answer"]) for e in entries], **columns)
    wrong = builtin.reasoning_gym(["wrong"] * 4, **columns)
    assert right == [1.0] * 4 and max(wrong) < 0.5


def test_length_is_a_share_of_the_longest():
    rewards = builtin.Length(200, penalty=0.5)(completion_ids=[[], [1] * 100, [1] * 200])
    assert rewards == [0.0, -0.25, -0.5]
    assert str(rewards[0]) == "0.0"


@pytest.mark.parametrize(
    ("tokens", "reward"),
    [(0, 0), (12, 0), (16, 0), (17, -0.25), (18, -0.5), (19, -0.75), (20, -1), (21, -1), (100, -1)],
)
def test_soft_overlong_in_its_three_regions(tokens, reward):
    """L = 20, C = 4: free up to 16 tokens, then 1/4 for each, -1 from 20 on (DAPO, eq. 13)."""
    assert builtin.SoftOverlong(20, 4)(completion_ids=[[1] * tokens]) == [reward]


def levenshtein(a, b):
    """His table, row by row (1966)."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        before, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (x != y))
    return row[-1]


def test_similarity_counts_levenshteins_edits():
    draw = random.Random(0)
    texts = ["".join(draw.choices("ab c", k=draw.randint(0, 9))).strip() for _ in range(400)]
    pairs = list(itertools.pairwise(texts))
    expected = [1 - levenshtein(a, b) / max(len(a), len(b), 1) if b else None for a, b in pairs]
    assert builtin.similarity([a for a, _ in pairs], [b for _, b in pairs]) == expected
    assert builtin.similarity(["sitting", "x", ""], ["kitten", None, "ab"]) == [1 - 3 / 7, None, 0.0]


def test_similarity_of_long_texts_takes_no_run_along():
    """The table of two texts of 20,000 characters has 400 million cells, minutes of Python: longer than a reward's time."""
    begin = time.process_time()
    (found,) = builtin.similarity(["ab" * 10_000], ["ba" * 10_000])
    assert found == 1 - 2 / 20_000 and time.process_time() - begin < 5.0


def test_reasoning_gym_does_not_apply_to_rows_without_a_task():
    (row,) = tasks.generate("chain_sum", 1, seed=3)
    columns = {name: [row[name], None] for name in ("task", "answer", "metadata")}
    assert builtin.reasoning_gym([str(row["answer"]), "5"], **columns) == [1.0, None]
