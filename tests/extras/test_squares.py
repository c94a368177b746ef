"""The game of squares, whose pictures and answers are worked out by hand, and the demo that learns it."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from psigrad.language.data.image_rows import observation_text
from psigrad.paths import claim
from psigrad_extras import squares
from psigrad_extras.squares import Board, Squares


def test_a_board_is_drawn_cell_by_cell():
    """b3 is the second column and the third row: pixels 9 to 14 across, and 17 to 22 down."""
    pixels = Board({"b3": "red"}).draw()
    coloured = {(x, y) for x, y in itertools.product(range(24), repeat=2) if pixels.getpixel((x, y)) != (255, 255, 255)}
    assert coloured == set(itertools.product(range(9, 15), range(17, 23)))
    assert pixels.getpixel((9, 17)) == (220, 40, 40)


def test_each_right_answer_is_half_of_the_reward_and_the_second_question_has_its_own_picture():
    for seed in range(20):
        colour, first, second = squares.boards(seed)
        count = sum(own == colour for own in first.colours.values())
        where = [place for place, own in second.colours.items() if own == colour]
        assert 0 <= count <= squares.MOST and len(where) == 1
        for answers, total in (((str(count), where[0]), 1.0), ((str(count + 1), where[0]), 0.5), (("x", "e9"), 0.0)):
            game = Squares()
            game.reset({"seed": seed})
            said, one, done = game.step(f" {answers[0]}\n")
            assert not done and said[0]["image"].tobytes() == second.draw().tobytes()
            _, other, done = game.step(answers[1])
            assert done and one + other == total


def test_demonstrations_are_the_games_with_a_share_of_mistakes(tmp_path):
    given = squares.rows(tmp_path, 300, 5)
    made = squares.demonstrations(given, tmp_path, 0.5, 0)
    right, wrong = [], {}
    for row, shown in zip(given, made, strict=True):
        game = Squares()
        game.reset(row)
        if (place := shown["messages"][-1]["content"]) != game.where:
            wrong.setdefault(game.where, set()).add(place)
        right += [float(game.step(turn["content"])[1]) * 2 for turn in shown["messages"] if turn["role"] == "assistant"]
    assert len(right) == 600 and sum(right) / 600 == pytest.approx(0.5, abs=0.06)
    assert wrong["b2"] == {"a2", "c2", "b1", "b3"} and wrong["a1"] == {"b1", "a2"} and wrong["c2"] == {"c1", "c3", "b2"}
    assert all(len(row["images"]) == 2 for row in made) and len(list(tmp_path.iterdir())) == 600
    assert observation_text([{"type": "image", "image": given[0]["images"][0]}]).count("\ufffc") == 2


def test_the_demo_runs_to_its_report(tmp_path):
    from psigrad_extras import demo_vision

    files = demo_vision.prepare(claim(tmp_path / "demo", "demo"), 0, False, hidden=32, layers=1, games=64)
    assert set(files) == {"demonstrations", "right", "games", "held_out", "base"}
    asked = {name: [row["images"][0] for row in map(json.loads, files[name].open())] for name in ("games", "held_out")}
    pictures = {name: {Path(file).read_bytes() for file in found} for name, found in asked.items()}
    assert len(asked["held_out"]) == 200 and 50 < len(asked["games"]) < 64 and not pictures["games"] & pictures["held_out"]
    result = demo_vision.run(str(tmp_path / "demo"), sft_steps=2, rl_steps=2, progress=False)
    report = (result.folder / "report.html").read_text()
    assert "right answers after RL" in report and "[image 24×24" in report
