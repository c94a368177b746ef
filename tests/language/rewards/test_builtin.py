"""The built-in rewards against cases worked out by hand."""

from __future__ import annotations

import time

import pytest
import reasoning_gym

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
        ("", "", 1),
        ("None", None, None),
        ([{"role": "assistant", "content": "42 "}], "42", 1),
        ([{"role": "assistant", "content": None}], "42", 0),
    ],
)
def test_exact(completion, answer, reward):
    assert builtin.exact([completion], [answer]) == [reward]


@pytest.mark.parametrize(
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
        ("5", "Natalia sold 48/2 = <<48/2=24>>24 clips.\n#### 5", 1),
        ("1000000.5", "1000000", 1),
        ("1000002", "1000000", 0),
        ("0.0000005", "0", 1),
        ("0.00001", "0", 0),
    ],
)
def test_numeric(completion, answer, reward):
    assert builtin.Numeric()([completion], [answer]) == [reward]


def test_numeric_is_quick_on_a_megabyte_of_digits():
    begin = time.process_time()
    assert builtin.Numeric()(["1" * 1_000_000, "1,111" * 200_000, "-" * 1_000_000, "e5 " * 300_000], ["5"] * 4) == [0, 0, 0, 1]
    assert time.process_time() - begin < 5.0


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        ("$\\frac{1}{2}$", "0.5", 1),
        ("so 0.5", "1/2", 1),
        ("\\boxed{42}", "42", 1),
        ("I get $x=3$, so \\boxed{\\frac{6}{2}}.", "3", 1),
        ("\\boxed{(x+1)^2}", "$x^2+2x+1$", 1),
        ("\\boxed{43}", "42", 0),
        ("no idea", "42", 0),
        ("", "42", 0),
        ("", "", None),
        ("anything", "", None),
        ("???", "???", None),
        ("42", None, None),
    ],
)
def test_math(completion, answer, reward):
    assert builtin.math([completion], [answer]) == [reward]


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
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


@pytest.mark.parametrize("task", ["chain_sum", "simple_equations", "countdown", "word_sorting"])
def test_reasoning_gym_is_the_datasets_own_score(task):
    rows = tasks.generate(task, 4, seed=3)
    dataset = reasoning_gym.create_dataset(task, size=4, seed=3)
    entries = list(dataset)
    columns = {name: [row[name] for row in rows] for name in ("task", "answer", "metadata")}
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
