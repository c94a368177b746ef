"""The documented rows: what is written is documented, and readers take what they need in whatever order it stands."""

from __future__ import annotations

import json
import math
import random
from typing import NotRequired, get_origin, get_type_hints

import pytest
from run_folders import TOKENS, make_run, rollout

from psigrad.language.rollout.collectors import rollout_row
from psigrad.language.rollout.types import Completion, Trajectory
from psigrad.records.read import load
from psigrad.records.rows import RolloutFigures, RolloutRow, figures, parse_step, rollout_figures
from psigrad.records.run_folder import to_line

NAN = math.nan
ROWS = {
    "plain": (rollout(9, 4, 2, reward=0.5, advantage=-1.5), RolloutFigures(9, "train", 4, 2, 0.5, -1.5, "scored", "", False)),
    "token by token": (
        rollout(9, 4, 2, reward=1, **TOKENS, advantages=[0.5, "NaN", 1e-7, -2]),
        RolloutFigures(9, "train", 4, 2, 1.0, -1.0, "scored", "", False),
    ),
    "keys and lists of numbers within texts": (
        rollout(3, 2, 1, prompt='], "reward": 5, "parts": {', completion='[1, 2, 3] "advantage": 3, "', reason="[1, 2]"),
        RolloutFigures(3, "train", 2, 1, 1.0, 1.0, "scored", "[]", False),
    ),
    "messages, unscored": (
        rollout(1, 0, 0, prompt=[{"role": "user", "content": "x"}], reward=None, status="unscored", advantage=None),
        RolloutFigures(1, "train", 0, 0, NAN, NAN, "unscored", "", False),
    ),
    "not a number, cut": (
        rollout(2, 1, 3, reward=NAN, finish_reason="length", parts={"reward": 1.0, "a": None}),
        RolloutFigures(2, "train", 1, 3, NAN, 1.0, "scored", "", True),
    ),
    "held out, several turns": (
        rollout(4, 2, 1, kind="eval", reward=-1e-9, turns=2, mask=[1, 0, 1, 1], step_rewards=[[0, 0.5]]),
        RolloutFigures(4, "eval", 2, 1, -1e-9, 1.0, "scored", "", False),
    ),
    "an episode": (
        {"step": 5, "kind": "episode", "episode": 3, "reward": 200.0, "length": 17},
        RolloutFigures(5, "episode", -1, 3, 200.0, NAN, "", "", False),
    ),
    "nothing but a step": ({"step": 6}, RolloutFigures(6, "other", -1, 0, NAN, NAN, "", "", False)),
    "odd values": (
        {"step": 7, "kind": ["x"], "row": "a", "k": None, "reward": "many"},
        RolloutFigures(7, "['x']", -1, 0, NAN, NAN, "", "", False),
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_the_figures_of_a_row_do_not_depend_on_the_order_of_its_keys(name):
    row, expected = ROWS[name]
    rng = random.Random(0)
    for _ in range(5):
        assert repr(rollout_figures(to_line(row))) == repr(expected)
        row = dict(rng.sample(list(row.items()), len(row)))
        if isinstance(row.get("parts"), dict):
            row["parts"] = dict(reversed(row["parts"].items()))


def test_what_is_no_row_is_none():
    torn = b'{"step": 1, "kind": "train", "completion_ids": [1, 2'
    steps = (b'{"step": -1}\n', b'{"step": "1"}\n', b'{"step": true}\n', b'{"step": 1.0}')
    wrong = (b"\n", b"[]\n", b"\xff", b"[" * 100_000, torn, *steps)
    assert [rollout_figures(line) for line in wrong] == [parse_step(line) for line in wrong] == [None] * len(wrong)


def test_figures_are_the_numbers_of_a_row():
    row = {"step": 3, "a": 1, "b": 0.5, "c": "NaN", "d": "-Infinity", "e": None, "f": [1], "g": "word", "h": 10**400}
    assert repr(figures(row)) == repr({"a": 1.0, "b": 0.5, "c": NAN, "d": -math.inf, "h": math.inf})


def test_a_report_reads_runs_whose_keys_stand_in_any_order(tmp_path):
    plain, shuffled = (make_run(tmp_path / name, 5) for name in ("plain", "shuffled"))
    rng = random.Random(1)
    for name in ("metrics", "timings", "rollouts", "events"):
        lines = [json.loads(line) for line in (plain / f"{name}.jsonl").read_text().splitlines()]
        lines = [dict(rng.sample(list(row.items()), len(row))) for row in lines]
        (shuffled / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    first, second = load(plain), load(shuffled)
    for name in ("metrics", "timings", "events", "rewards", "troubles", "samples"):
        assert getattr(first, name) == getattr(second, name), name


def test_every_key_that_is_written_is_documented():
    completion = Completion((5, 6), (-0.1, -0.2), (-0.1, -0.2), "stop", 11)
    plain = Trajectory(row=4, k=1, prompt_ids=(1,), completion=completion, version=3)
    turns = Trajectory(4, 1, (1,), completion, 3, mask=(True, False), step_rewards=((0, 0.5),), turns=2)
    hints = get_type_hints(RolloutRow, include_extras=True)
    sometimes = {name for name, hint in hints.items() if get_origin(hint) is NotRequired}
    assert rollout_row(plain, 1, "train", "p").keys() == hints.keys() - sometimes
    assert rollout_row(turns, 1, "eval", "p").keys() == hints.keys() - sometimes | {"turns", "mask", "step_rewards"}
    assert sometimes >= TOKENS.keys()
