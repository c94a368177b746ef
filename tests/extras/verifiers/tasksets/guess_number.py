"""A taskset of verifiers 0.4 with an environment of several turns: three guesses."""

from __future__ import annotations

from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["GuessEnv", "GuessTaskset"]


class GuessData(vf.TaskData):
    answer: int


class GuessTask(vf.Task[GuessData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=1.0)
    async def hit(self, task: GuessData, trace: vf.Trace) -> float:
        return float(trace.last_reply == str(task.answer)) - 0.1 * (trace.num_turns - 1)


class GuessTaskset(vf.Taskset[GuessTask, vf.TasksetConfig]):
    def load(self) -> Iterator[GuessTask]:
        for i in range(20):
            yield GuessTask(GuessData(prompt=f"guess {i % 3}", system_prompt="a number", answer=i % 7), self.config.task)


class GuessConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class GuessEnv(vf.Env[GuessConfig]):
    async def run(self, task: GuessTask, agents: vf.Agents) -> None:
        async with agents.player.interaction(task) as talk:
            segment = await talk.turn()
            for _ in range(2):
                if segment.terminated or segment.last_reply == str(task.data.answer):
                    break
                segment = await talk.turn("higher" if segment.last_reply < str(task.data.answer) else "lower")
