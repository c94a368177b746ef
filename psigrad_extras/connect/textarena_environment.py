"""Games of textarena: `--environment textarena:KuhnPoker-v0`, or `textarena:NAME:PLAYERS` for another number of players.

Each player is a seat. A seat reads the messages that the game has sent to it since its last turn. textarena's wrappers, which
repeat the past, are not used.

Source: https://github.com/LeonGuertler/TextArena.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

from psigrad import extras
from psigrad.errors import UserError, nearest
from psigrad.seeds import derive

MOST_PLAYERS = 16


def adapt_named(given: str) -> type:
    """Return the environment of `textarena:NAME` or `textarena:NAME:PLAYERS` as a class. Raises `UserError` if there is none."""
    name, _, players = given.partition(":")
    known = _library().envs.registration.ENV_REGISTRY
    if name not in known:
        raise UserError(f"textarena has no game {name!r}; expected a name from its registry{nearest(name, known) or '.'}")
    counts = [int(players)] if players.isdecimal() else [2, 1, *range(3, MOST_PLAYERS + 1)]
    seats = next((count for count in counts if _starts(name, count)), 0)
    if not seats or (players and not players.isdecimal()):
        raise UserError(
            f"textarena's {name} does not start with {players or f'1 to {MOST_PLAYERS}'} players; give a number, as in {name}:3."
        )
    return type("TextArenaGame", (TextArenaGame,), {"name": name, "seats": seats})


class TextArenaGame:
    """One game, with the row's seed. `adapt_named` returns a subclass for a game's name."""

    name: ClassVar[str] = ""
    seats: ClassVar[int] = 2

    def reset(self, row: Mapping[str, Any]) -> Any:
        """Start the game. Return (the seat that acts first, its observation), or with one player the observation alone."""
        self._random = random.Random(int(row["seed"])).getstate()
        with self._own_random():
            self._game = _library().make(self.name)
            self._game.reset(num_players=self.seats, seed=int(row["seed"]))
            seat, said = self._observe()
        return (seat, said) if self.seats > 1 else said

    def step(self, completion: str) -> Any:
        """Play the completion as the acting seat's move. Rewards are 0 until the game ends."""
        with self._own_random():
            done, _ = self._game.step(action=completion)
            seat, said = (0, "") if done else self._observe()
            given = (self._game.close()[0] or {}) if done else {}
        rewards = tuple(float(given.get(player, 0.0)) for player in range(self.seats))
        return (seat, said, rewards, bool(done)) if self.seats > 1 else (said, rewards[0], bool(done))

    @classmethod
    def rows(cls, count: int, seed: int) -> list[dict[str, Any]]:
        """Return `count` rows, each with a different seed for a game."""
        return [{"prompt": f"You play {cls.name}.\n", "seed": derive(seed, "textarena", n) % 2**31} for n in range(count)]

    def _observe(self) -> tuple[int, str]:
        """Return (the seat that acts, its new messages). Its own turns are omitted, since its context has them already."""
        game = self._game
        while isinstance(game, _library().Wrapper):
            game = game.env
        seat, messages = game.get_observation()
        own = _library().ObservationType.PLAYER_ACTION
        return int(seat), "\n".join(text for player, text, kind in messages if (player, kind) != (seat, own))

    @contextmanager
    def _own_random(self) -> Iterator[None]:
        """During the block, Python's global random generator has the game's own state, since textarena seeds and uses it."""
        outer = random.getstate()
        random.setstate(self._random)
        try:
            yield
        finally:
            self._random = random.getstate()
            random.setstate(outer)


def _library() -> Any:
    """Return textarena. Raises `UserError` if it is not installed."""
    with extras.needing("An environment of textarena", "textarena"):
        import textarena
    return textarena


def _starts(name: str, players: int) -> bool:
    outer = random.getstate()
    try:
        _library().make(name).reset(num_players=players, seed=0)
        return True
    except (AssertionError, ValueError, KeyError, IndexError, TypeError):
        return False
    finally:
        random.setstate(outer)
