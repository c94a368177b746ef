"""Games of textarena as games of seats, where it is installed: `make test-textarena`."""

from __future__ import annotations

import random

import pytest

from psigrad.errors import UserError
from psigrad.language.episodes.environment_pool import EnvironmentPool
from psigrad.language.episodes.environments import Opening, resolve

pytestmark = pytest.mark.textarena


def test_a_game_is_played_by_its_seats_and_depends_on_its_row_alone():
    game = resolve("textarena:KuhnPoker-v0")
    assert game.seats == 2 and resolve("textarena:ThreePlayerTicTacToe-v0").seats == 3
    row = game.rows(1, 7)[0]

    def played(beside: bool):
        random.seed(beside)
        one, other = game(), game()
        said = [one.reset(row)]
        for _ in range(40):
            if beside:  # another game draws from Python's generator in between
                other.reset({"seed": random.randrange(99)})
            said.append(one.step("[check]"))
            if said[-1][3]:
                break
        return said

    assert played(True) == played(False)
    seat, text = played(False)[0]
    assert f"You are Player {seat}" in text and text.count("Your card is") == 1
    assert sorted(played(False)[-1][2]) in ([-1, 1], [0, 0])


def test_it_runs_in_workers_and_wrong_names_are_told():
    game = resolve("textarena:TicTacToe-v0")
    with EnvironmentPool(game, timeout=60) as playing:
        (opening,) = playing.begin(game.rows(1, 0))
        assert isinstance(opening, Opening) and opening.seat == 0
        assert playing.step({0: "[4]"})[0].seat == 1
        assert playing.step({0: "[9]"})[0].seat == 1  # an illegal move may be repeated once
        assert playing.step({0: "[9]"})[0].rewards == (0, -1) or playing.step({0: "[9]"})[0].done
    with pytest.raises(UserError, match="did you mean 'KuhnPoker-v0'"):
        resolve("textarena:KuhnPokr-v0")
    with pytest.raises(UserError, match="does not start with 7 players"):
        resolve("textarena:KuhnPoker-v0:7")
