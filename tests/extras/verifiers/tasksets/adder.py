"""A taskset of verifiers 0.4 with a tool."""

from __future__ import annotations

from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["AdderTaskset"]


class AdderData(vf.TaskData):
    answer: int


class Adder(vf.Toolset[vf.ToolsetConfig]):
    @vf.tool
    async def add(self, a: int, b: int) -> str:
        """Add two numbers."""
        return str(a + b)


class AdderTask(vf.Task[AdderData, vf.State, vf.TaskConfig]):
    @classmethod
    def toolsets(cls, config: vf.TaskConfig) -> list[vf.Toolset]:
        return [Adder(vf.ToolsetConfig())]

    @vf.reward(weight=1.0)
    async def hit(self, task: AdderData, trace: vf.Trace) -> float:
        return float(trace.last_reply == str(task.answer))


class AdderTaskset(vf.Taskset[AdderTask, vf.TasksetConfig]):
    def load(self) -> Iterator[AdderTask]:
        for i in range(20):
            yield AdderTask(AdderData(prompt=f"{i} + 1", answer=i + 1), self.config.task)


if __name__ == "__main__":
    Adder.run()
