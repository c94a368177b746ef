"""An OpenEnv server: in each of three turns the policy reads a number n and must say n + 1. python openenv_server.py [PORT]"""

from __future__ import annotations

import random
import sys
from typing import Any

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Say(Action):
    """The policy's action: a number."""

    number: int


class Heard(Observation):
    """The observation: the next number as text, empty at the end."""

    text: str = ""


class Successor(Environment):
    """One episode. Each right answer gives the reward 1/3."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Heard:
        """Draw the numbers from the seed, and return the first."""
        self.numbers, self.turn = random.Random(seed).choices(range(1, 6), k=3), 0
        return Heard(text=str(self.numbers[0]))

    def step(self, action: Say, timeout_s: float | None = None, **_: Any) -> Heard:
        """Return the next number, and the reward for this action."""
        right = action.number == self.numbers[self.turn] + 1
        self.turn += 1
        done = self.turn == len(self.numbers)
        return Heard(text="" if done else str(self.numbers[self.turn]), done=done, reward=right / 3)

    @property
    def state(self) -> State:
        """The state that OpenEnv asks for: only the number of turns taken."""
        return State(step_count=self.turn)


if __name__ == "__main__":
    app = create_fastapi_app(Successor, Say, Heard, max_concurrent_envs=1024)
    # otherwise uvicorn prints a traceback when a client closes its connection
    uvicorn.run(app, port=int(sys.argv[1]) if len(sys.argv) > 1 else 8000, log_level="critical")
