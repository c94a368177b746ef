"""A taskset for verifiers 0.4: in each of three turns the policy reads a number n and must answer n + 1."""

from __future__ import annotations

import random
from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["SuccessorEnv", "SuccessorTaskset"]


class NumbersData(vf.TaskData):
    """The data of a task: the numbers that the policy reads."""

    numbers: list[int]


class Successor(vf.Task[NumbersData, vf.State, vf.TaskConfig]):
    """A task. Each right answer adds 1/3 to the reward."""

    @vf.reward(weight=1.0)
    async def right(self, task: NumbersData, trace: vf.Trace) -> float:
        """Return the share of the three answers that are right."""
        said = [message.content for message in trace.assistant_messages]
        return sum(text == str(number + 1) for text, number in zip(said, task.numbers, strict=False)) / 3


class SuccessorTaskset(vf.Taskset[Successor, vf.TasksetConfig]):
    """The tasks of the game."""

    def load(self) -> Iterator[Successor]:
        """Yield 10,000 tasks. The numbers of task i are drawn from the seed i."""
        for i in range(10_000):
            numbers = random.Random(i).choices(range(1, 6), k=3)
            yield Successor(NumbersData(prompt=str(numbers[0]), numbers=numbers), self.config.task)


class SuccessorConfig(vf.EnvConfig):
    """The settings: the agent that plays."""

    player: vf.AgentConfig = vf.AgentConfig()


class SuccessorEnv(vf.Env[SuccessorConfig]):
    """The conversation of an episode."""

    async def run(self, task: Successor, agents: vf.Agents) -> None:
        """Send the agent one number per turn."""
        async with agents.player.interaction(task) as talk:
            segment = await talk.turn()
            for number in task.data.numbers[1:]:
                if segment.terminated:
                    break
                segment = await talk.turn(str(number))
