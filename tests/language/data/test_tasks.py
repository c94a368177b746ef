"""Rows of procedural tasks."""

from __future__ import annotations

import pytest

from psigrad.errors import UserError
from psigrad.language.data import tasks

# Pairs of numbers to 60: 3,540 prompts, of which 3,000 are nearly all there are.
GCD = {"max_numbers": 2, "max_value": 60}


def ones(rows):
    return sum(row["answer"] == "1" for row in rows) / len(rows)


def test_the_order_of_distinct_rows_says_nothing_of_how_often_a_task_makes_them(monkeypatch):
    """In the order of drawing, the last of these prompts of gcd nearly all have the answer 1."""
    shuffled = tasks.generate_distinct("gcd", 3000, seed=1, **GCD)
    assert len({row["prompt"] for row in shuffled}) == 3000
    error = 4 * (0.25 / 500 * 2) ** 0.5
    assert abs(ones(shuffled[:500]) - ones(shuffled[-500:])) < error
    assert tasks.generate_distinct("gcd", 3000, seed=1, **GCD) == shuffled
    monkeypatch.setattr(tasks.seeds, "permutation", lambda size, *names: range(size))
    drawn = tasks.generate_distinct("gcd", 3000, seed=1, **GCD)
    assert sorted(row["prompt"] for row in drawn) == sorted(row["prompt"] for row in shuffled)
    assert abs(ones(drawn[:500]) - ones(drawn[-500:])) > error, "negative control: the order of drawing is not fair"


def test_a_second_draw_goes_on_behind_the_first(monkeypatch):
    """Draw n of the task is n // 10: of size 3, each draw of 6 has one prompt or two, and the third prompt is draw 20."""
    seen = []
    drawn = lambda name, n, at: seen.append((n, at)) or [{"prompt": i // 10} for i in range(at, at + n)]  # noqa: E731
    monkeypatch.setattr(tasks, "generate", drawn)
    assert sorted(row["prompt"] for row in tasks.generate_distinct("x", 3, seed=0)) == [0, 1, 2]
    assert seen == [(6, 0), (6, 6), (6, 12), (6, 18)]
    monkeypatch.setattr(tasks, "generate", lambda name, n, at: [{"prompt": "one"}])
    with pytest.raises(UserError, match="gave 1 different prompts in 60 draws, not 3"):
        tasks.generate_distinct("x", 3, seed=0)


def test_a_task_with_too_few_prompts_is_refused():
    with pytest.raises(UserError, match=r"gave \d+ different prompts in \d+ draws, not 100"):
        tasks.generate_distinct("gcd", 100, 1, max_value=5)
