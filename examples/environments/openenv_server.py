"""A server of OpenEnv: say the number after the one that you hear, three times. python openenv_server.py [PORT]"""

from __future__ import annotations

import random
import sys
from typing import Any

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Say(Action):
    """What the policy does."""

    number: int


class Heard(Observation):
    """What it hears."""

    text: str = ""


class Successor(Environment):
    """One episode. Each of three turns that is right has a third."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Heard:
        """The numbers are the seed's."""
        self.numbers, self.turn = random.Random(seed).choices(range(1, 6), k=3), 0
        return Heard(text=str(self.numbers[0]))

    def step(self, action: Say, timeout_s: float | None = None, **_: Any) -> Heard:
        """The next number, and what the last answer is worth."""
        right = action.number == self.numbers[self.turn] + 1
        self.turn += 1
        done = self.turn == len(self.numbers)
        return Heard(text="" if done else str(self.numbers[self.turn]), done=done, reward=right / 3)

    @property
    def state(self) -> State:
        """Nothing is to be seen."""
        return State(step_count=self.turn)


if __name__ == "__main__":
    app = create_fastapi_app(Successor, Say, Heard, max_concurrent_envs=1024)
    # a client that goes first is nothing to print a traceback about
    uvicorn.run(app, port=int(sys.argv[1]) if len(sys.argv) > 1 else 8000, log_level="critical")
