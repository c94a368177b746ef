"""A taskset of verifiers 0.4: say the number after the one that you hear, three times."""

from __future__ import annotations

import random
from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["SuccessorEnv", "SuccessorTaskset"]


class NumbersData(vf.TaskData):
    """What a task knows."""

    numbers: list[int]


class Successor(vf.Task[NumbersData, vf.State, vf.TaskConfig]):
    """Each of three turns that is right has a third."""

    @vf.reward(weight=1.0)
    async def right(self, task: NumbersData, trace: vf.Trace) -> float:
        """The share of answers that are right."""
        said = [message.content for message in trace.assistant_messages]
        return sum(text == str(number + 1) for text, number in zip(said, task.numbers, strict=False)) / 3


class SuccessorTaskset(vf.Taskset[Successor, vf.TasksetConfig]):
    """Its tasks."""

    def load(self) -> Iterator[Successor]:
        """As many as are asked for."""
        for i in range(10_000):
            numbers = random.Random(i).choices(range(1, 6), k=3)
            yield Successor(NumbersData(prompt=str(numbers[0]), numbers=numbers), self.config.task)


class SuccessorConfig(vf.EnvConfig):
    """Who plays."""

    player: vf.AgentConfig = vf.AgentConfig()


class SuccessorEnv(vf.Env[SuccessorConfig]):
    """The conversation."""

    async def run(self, task: Successor, agents: vf.Agents) -> None:
        """A number, and another, and another."""
        async with agents.player.interaction(task) as talk:
            segment = await talk.turn()
            for number in task.data.numbers[1:]:
                if segment.terminated:
                    break
                segment = await talk.turn(str(number))
