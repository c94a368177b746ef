"""Rows of procedural tasks. `distinct` shuffles its rows, so that a split by position is unbiased."""

from __future__ import annotations

import json
import math

import pytest
from reasoning_gym import create_dataset
from scipy.stats import binomtest

from psigrad import seeds
from psigrad.data import tasks
from psigrad.errors import UserError
from psigrad.recipes import demo

SIZE, TAIL, SEED = 3240, 500, 1


def _share_of_ones(answers):
    """The 99.9 % interval of the share of the answer 1."""
    interval = binomtest(sum(answer == "1" for answer in answers), len(answers)).proportion_ci(0.999, method="wilson")
    return interval.low, interval.high


def _overlap(a, b):
    return a[0] <= b[1] and b[0] <= a[1]


def _in_order_of_generation(name, size, seed, draws, **settings):
    """Different prompts and their answers in the order that reasoning-gym yields them: the biased order."""
    dataset = create_dataset(name, size=draws, seed=seed, **settings)
    return list({entry["question"]: entry["answer"] for entry in dataset}.items())[:size]


def test_first_and_last_rows_are_of_one_distribution():
    """gcd draws again where the answer is 1, so those prompts are found last among the different ones."""
    made = [row["answer"] for row in tasks.distinct("gcd", SIZE, SEED, max_value=60)]
    assert _overlap(_share_of_ones(made[:TAIL]), _share_of_ones(made[-TAIL:]))
    control = [answer for _, answer in _in_order_of_generation("gcd", SIZE, SEED, 20 * SIZE, max_value=60)]
    assert not _overlap(_share_of_ones(control[:TAIL]), _share_of_ones(control[-TAIL:]))


def test_rows_are_different_and_the_same_in_every_call():
    rows = tasks.distinct("gcd", 200, SEED, max_value=60)
    assert len({row["prompt"] for row in rows}) == 200
    assert rows == tasks.distinct("gcd", 200, SEED, max_value=60)
    assert rows != tasks.distinct("gcd", 200, SEED + 1, max_value=60)


def test_a_task_with_too_few_prompts_is_refused():
    with pytest.raises(UserError, match=r"gave \d+ different prompts in \d+ draws, not 100"):
        tasks.distinct("gcd", 100, SEED, max_value=5)


def test_held_out_words_of_the_demo_are_drawn_from_the_whole_order(tmp_path, monkeypatch):
    """Their places in the order of generation have the mean of a random draw; the first rows in that order do not."""
    words = 1600
    monkeypatch.setattr(demo, "WORDS", words)
    files = demo.prepare(tmp_path, SEED, False)
    prompts = {name: [json.loads(line)["prompt"] for line in files[name].open()] for name in ("held_out", "prompts")}
    assert len(prompts["held_out"]) == demo.HELD_OUT and not set(prompts["held_out"]) & set(prompts["prompts"])
    size = words + demo.HELD_OUT
    seed = seeds.derive(SEED, "demo") % 2**31
    order = _in_order_of_generation(demo.TASK, size, seed, 2 * size, min_word_len=3, max_word_len=8)
    places = {prompt: i for i, (prompt, _) in enumerate(order)}
    mean = sum(places[prompt] for prompt in prompts["held_out"]) / demo.HELD_OUT
    spread = size / math.sqrt(12 * demo.HELD_OUT)  # standard deviation of the mean of uniform places
    assert abs(mean - size / 2) < 4 * spread
    assert abs(demo.HELD_OUT / 2 - size / 2) > 4 * spread
