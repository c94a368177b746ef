"""Rows of procedural tasks."""

from __future__ import annotations

import json
import math

import pytest
from reasoning_gym import create_dataset

from psigrad import seeds
from psigrad.errors import UserError
from psigrad.language.data import tasks
from psigrad_extras import demo

# Pairs of numbers to 60: 3,540 prompts, of which 3,000 are nearly all there are.
GCD = {"max_numbers": 2, "max_value": 60}


def ones(rows):
    return sum(row["answer"] == "1" for row in rows) / len(rows)


def test_the_order_of_distinct_rows_says_nothing_of_how_often_a_task_makes_them(monkeypatch):
    """In the order of drawing, the last of these prompts of gcd nearly all have the answer 1."""
    shuffled = tasks.distinct("gcd", 3000, seed=1, **GCD)
    assert len({row["prompt"] for row in shuffled}) == 3000
    error = 4 * (0.25 / 500 * 2) ** 0.5
    assert abs(ones(shuffled[:500]) - ones(shuffled[-500:])) < error
    assert tasks.distinct("gcd", 3000, seed=1, **GCD) == shuffled
    monkeypatch.setattr(tasks.seeds, "permutation", lambda size, *names: range(size))
    drawn = tasks.distinct("gcd", 3000, seed=1, **GCD)
    assert sorted(row["prompt"] for row in drawn) == sorted(row["prompt"] for row in shuffled)
    assert abs(ones(drawn[:500]) - ones(drawn[-500:])) > error, "negative control: the order of drawing is not fair"


def test_a_task_with_too_few_prompts_is_refused():
    with pytest.raises(UserError, match=r"gave \d+ different prompts in \d+ draws, not 100"):
        tasks.distinct("gcd", 100, 1, max_value=5)


def test_held_out_words_of_the_demo_are_drawn_from_the_whole_order(tmp_path):
    """Their places in the order of generation have the mean of a random draw; the first rows in that order do not."""
    words = 1600
    files = demo.prepare(tmp_path, 1, False, words=words)
    prompts = {name: [json.loads(line)["prompt"] for line in files[name].open()] for name in ("held_out", "prompts")}
    assert len(prompts["held_out"]) == demo.HELD_OUT and not set(prompts["held_out"]) & set(prompts["prompts"])
    size = words + demo.HELD_OUT
    seed = seeds.derive(1, "demo") % 2**31
    drawn = create_dataset(demo.TASK, size=2 * size, seed=seed, min_word_len=3, max_word_len=8)
    places = {prompt: i for i, prompt in enumerate(dict.fromkeys(entry["question"] for entry in drawn))}
    mean = sum(places[prompt] for prompt in prompts["held_out"]) / demo.HELD_OUT
    spread = size / math.sqrt(12 * demo.HELD_OUT)  # standard deviation of the mean of uniform places
    assert abs(mean - size / 2) < 4 * spread
    assert abs(demo.HELD_OUT / 2 - size / 2) > 4 * spread
