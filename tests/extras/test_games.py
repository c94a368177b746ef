"""The games by name: their best play, their demonstrations, the calculator."""

from __future__ import annotations

import pytest

from psigrad.errors import UserError
from psigrad.language.episodes.environments import resolve
from psigrad_extras import games
from psigrad_extras.games import GuessNumber, TextGrid, calculate


@pytest.mark.parametrize("name", games.GAMES)
def test_games_reward_their_best_play_as_they_say(name):
    game = games.GAMES[name]
    total, rows = 0.0, game.rows(300, 7)
    for row in rows:
        environment, observation = game(), ""
        environment.reset(row)
        low, high, earned, done = 1, GuessNumber.high, 0.0, False
        for _ in range(20):
            observation, gain, done = environment.step(best(name, row, environment, observation, (low, high)))
            earned += gain
            if done:
                break
            middle = (low + high) // 2
            low, high = (middle + 1, high) if observation == "higher" else (low, middle - 1)
        assert done
        total += earned
        if name == "grid":
            assert earned == pytest.approx(shortest_walk(row))
    if name == "calculator":
        assert total / 300 == pytest.approx(0.95)
    if name == "guess":
        assert total / 300 == pytest.approx(mean_of_halving(), abs=0.03)


def mean_of_halving() -> float:
    """The mean return of guessing the middle: 2^(d−1) secrets are hit at guess d where `high` is 2^n − 1."""
    high = GuessNumber.high
    depths = [d for d in range(1, high.bit_length() + 1) for _ in range(2 ** (d - 1))][:high]
    return sum(1 - 0.1 * (d - 1) for d in depths) / high


def shortest_walk(row) -> float:
    """The return of a shortest walk around the trap from the row's start."""
    goal, trap, last = tuple(row["goal"]), tuple(row["trap"]), TextGrid.size - 1
    reached, frontier, steps = {tuple(row["start"])}, [tuple(row["start"])], 0
    while goal not in reached:
        near = {(min(max(x + dx, 0), last), min(max(y + dy, 0), last)) for x, y in frontier for dx, dy in TextGrid.moves.values()}
        frontier = [cell for cell in near if cell not in reached and cell != trap]
        reached |= set(frontier)
        steps += 1
    return 1 - 0.05 * (steps - 1)


def best(name, row, environment, observation, bounds) -> str:
    """The best play's next turn."""
    if name == "guess":
        return str(sum(bounds) // 2)
    if name == "calculator":
        return observation or f"= {row['prompt'][0]['content'][:-1]}"
    options = {}
    for move, (dx, dy) in TextGrid.moves.items():
        cell = (environment.at[0] + dx, environment.at[1] + dy)
        if min(cell) >= 0 and max(cell) < TextGrid.size and cell != environment.trap:
            there = {**row, "start": list(cell)}
            options[move] = 2.0 if cell == environment.goal else shortest_walk(there)
    return max(options, key=options.get)


def test_halving_is_the_best_of_all_first_guesses():
    """Enumerated: the value of guessing g first and halving after that, for every g."""

    def value(low, high, guess, before):
        if low > high:
            return 0.0
        here = 1 - 0.1 * before
        middle = [(low, guess - 1), (guess + 1, high)]
        return here + sum(value(a, b, (a + b) // 2, before + 1) for a, b in middle)

    values = {g: value(1, 7, g, 0) / 7 for g in range(1, 8)}
    assert max(values, key=values.get) == 4 and values[4] == pytest.approx(mean_of_halving())


@pytest.mark.parametrize("name", games.GAMES)
def test_demonstrations_are_conversations_that_end_with_the_players_turn(name):
    for row in games.GAMES[name].demonstrations(50, 3):
        roles = [m["role"] for m in row["messages"]]
        assert roles == ["user", "assistant"] * (len(roles) // 2)


@pytest.mark.parametrize("text", ["__import__('os')", "2**9", "1/0", "a", "(1", "1" * 200, "True", "1.5", ""])
def test_the_calculator_calculates_and_does_nothing_else(text):
    with pytest.raises(ValueError):
        calculate(text)
    assert calculate(" 12*34 - -1") == 409


def test_games_are_environments_by_name():
    assert resolve("guess") is GuessNumber
    with pytest.raises(UserError, match="did you mean 'guess'"):
        resolve("gues")
