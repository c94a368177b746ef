"""`psigrad grid`: what it shows is what the solver found, and mistakes are sentences."""

from __future__ import annotations

import io

import numpy as np
import pytest
from rich.console import Console

from psigrad import cli
from psigrad.errors import UserError
from psigrad.tabular import evaluate, greedy, q_values, solve
from psigrad.tabular.solvers import SOLVERS
from psigrad_extras import grid
from psigrad_extras.grid import GridSettings


def shown(**settings) -> tuple[str, object]:
    console = Console(file=io.StringIO(), width=100)
    last = grid.run(GridSettings(**settings), console)
    return console.file.getvalue(), last


@pytest.mark.parametrize("method", SOLVERS)
def test_every_method_ends_at_the_exact_values_and_shows_them(method):
    text, last = shown(method=method, slip=0.2, step_reward=-0.01)
    world = grid.grid_of(GridSettings(slip=0.2, step_reward=-0.01))
    mdp = world.mdp()
    best = solve(mdp)
    assert np.abs(last.value - best.value).max() < 1e-6
    assert np.abs(evaluate(mdp, last.policy) - best.value).max() < 1e-6
    final = " ".join(text.strip().splitlines()[-9:-1])
    numbers = [float(cell[:-1]) for cell in final.split() if cell[-1] in "↑→↓←"]
    assert max(numbers) == pytest.approx(max(best.value), abs=0.006)


def test_frames_are_the_first_every_nth_and_the_last():
    text, last = shown(every=5)
    frames = [line for line in text.splitlines() if "largest change" in line]
    said = [int(frame.split("sweep ")[1].split(":")[0]) for frame in frames]
    assert said == [1, *range(5, last.iteration + 1, 5), last.iteration]
    twice, last = shown(every=1)
    assert twice.count("largest change") == last.iteration  # a last sweep that was shown is not shown again


def test_a_map_from_a_file(tmp_path):
    (tmp_path / "map.txt").write_text("S.+\n.#-\n...\n")
    text, last = shown(map=str(tmp_path / "map.txt"), discount=0.5)
    assert last.value[0] == pytest.approx(0.5) and "██████" in text


def test_a_film_ends_with_the_last_sweep():
    text, last = shown(method="policy_iteration", play=1e-4)
    assert f"sweep {last.iteration}" in text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--method", "valu_iteration"], "did you mean 'value_iteration'"),
        (["--slip", "2"], "slip is 2"),
        (["--map", "/nowhere"], "cannot be read"),
        (["--discount", "1.5"], "1.5"),
        (["--slop", "1"], "--slip"),
        (["--every", "-1"], "every is -1; expected 0 or more"),
        (["--play", "-0.5"], "play is -0.5; expected 0 or more"),
        (["--discount", "1", "--step-reward", "0.1", "--method", "policy_iteration"], "use gamma below 1"),
    ],
)
def test_a_mistake_is_a_sentence(arguments, said, capsys):
    assert cli.main(["grid", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_a_map_that_is_none_is_refused(tmp_path):
    (tmp_path / "map.txt").write_text("S?+\n")
    with pytest.raises(UserError, match="sign"):
        shown(map=str(tmp_path / "map.txt"))


def test_a_file_that_is_no_text_is_named(tmp_path):
    (tmp_path / "map.bin").write_bytes(b"\x7fELF\xd0\xff")
    with pytest.raises(UserError, match=r"map\.bin' cannot be read: the file is not text"):
        shown(map=str(tmp_path / "map.bin"))


def test_the_help_says_what_each_flag_is(capsys):
    with pytest.raises(SystemExit):
        cli.main(["grid", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    for words in (
        "`#` wall",
        "moving at a right angle",
        "prioritised_sweeping; default value_iteration",
        "as a film",
    ):
        assert words in text


def test_a_world_that_is_worth_infinitely_much_is_said_to_be(monkeypatch):
    monkeypatch.setattr(grid, "MOST_SWEEPS", 50)
    text, _ = shown(discount=1.0, step_reward=0.1)
    assert "Not finished after 50 sweeps: with a reward at every step" in text
    assert "Not finished" not in shown(discount=1.0, step_reward=-0.1)[0]


@pytest.mark.parametrize("method", SOLVERS)
@pytest.mark.parametrize("slip", [0.0, 0.2])
def test_without_a_discount_the_arrows_lead_to_the_prize(method, slip):
    """Every step is free, so nearly all actions are worth the same: of those that are, the arrow is one that leads on."""
    text, last = shown(method=method, discount=1.0, slip=slip)
    mdp = grid.grid_of(GridSettings(discount=1.0, slip=slip)).mdp()
    expected = solve(mdp).value
    np.testing.assert_allclose(last.value, expected, atol=1e-6)
    np.testing.assert_allclose(evaluate(mdp, last.policy), expected, atol=1e-6)
    assert "·" not in text.strip().split("\n\n")[-1]
    if method == "value_iteration" and slip == 0:  # negative control: the first of equal actions walks against the wall
        first = greedy(q_values(mdp, last.value))
        assert (evaluate(mdp, first) < expected - 0.5).any()


def test_where_no_best_action_leads_to_an_end_no_arrow_is_shown(tmp_path):
    """A step that pays is worth more than the prize: who is greedy walks on for ever."""
    (tmp_path / "map.txt").write_text("S..+\n")
    text, _ = shown(map=str(tmp_path / "map.txt"), discount=1.0, step_reward=0.5)
    assert "·" in text and "Not finished" in text
