"""What the demo prepares: its words and its model. That it learns is tests/long/test_demo.py."""

from __future__ import annotations

import json
import math

import pytest
from reasoning_gym import create_dataset

from psigrad import seeds
from psigrad.config import Sampling
from psigrad.errors import UserError
from psigrad_extras import demo


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


def test_the_demos_files_are_made_once_and_its_model_has_room_for_completions(tmp_path):
    """Whoever tries a command on it after the demo gives no length."""
    files = demo.prepare(tmp_path, 0, False, words=50, hidden=16, layers=1)
    room = json.loads((files["base"] / "config.json").read_text())["max_position_embeddings"]
    assert room >= Sampling().max_completion_length + 64
    before = files["base"].stat().st_mtime_ns
    assert demo.prepare(tmp_path, 0, False, words=50, hidden=16, layers=1) == files
    assert files["base"].stat().st_mtime_ns == before, "made once"
    with pytest.raises(UserError, match="holds a demo with seed 0, not 1; choose another output_dir"):
        demo.prepare(tmp_path, 1, False, words=50, hidden=16, layers=1)
