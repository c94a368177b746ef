"""What came of collecting completions for a step, and how a checkpoint keeps it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from psigrad.language.rollout.types import Completion, Trajectory


@dataclass(frozen=True)
class Collected:
    """Scored completions of one step: all of them, and the groups that are trained on."""

    trajectories: list[Trajectory]
    groups: list[list[Trajectory]]
    cursor: int
    entries: dict[str, int]
    """What became of the prompts, as the ledger has it."""

    def result(self) -> Collected:
        """Itself; a collection that another thread is at work on has to be waited for."""
        return self

    def to_json(self) -> str:
        """All of it as text, floats to their last digit."""
        place = {id(t): n for n, t in enumerate(self.trajectories)}
        groups = [[place[id(t)] for t in group] for group in self.groups]
        rest = {"groups": groups, "cursor": self.cursor, "entries": self.entries}
        return json.dumps({"trajectories": [asdict(t) for t in self.trajectories], **rest})

    @classmethod
    def from_json(cls, text: str) -> Collected:
        """The inverse of `to_json`."""
        held = json.loads(text)
        trajectories = [_trajectory(fields) for fields in held["trajectories"]]
        groups = [[trajectories[n] for n in group] for group in held["groups"]]
        return cls(trajectories, groups, held["cursor"], held["entries"])


ELSEWHERE = Collected([], [], 0, {})
"""Stands for a collection that another process has."""


class Pending(Protocol):
    """A collection that may still be under way."""

    def result(self) -> Collected:
        """Wait for it."""
        ...


def _trajectory(held: dict[str, Any]) -> Trajectory:
    fields: dict[str, Any] = {name: tuple(x) if isinstance(x, list) else x for name, x in held.items()}
    written: dict[str, Any] = {name: tuple(x) if isinstance(x, list) else x for name, x in held["completion"].items()}
    fields["completion"] = Completion(**written)
    fields["step_rewards"] = tuple((place, reward) for place, reward in held["step_rewards"])
    return Trajectory(**fields)
