"""Rollouts by agents: many sessions at once, each in a process that can be killed. All query the policy over HTTP."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, Unpack

from psigrad.language.data.image_rows import to_agent_row
from psigrad.language.episodes.episodes import settle
from psigrad.language.episodes.players import PlayedPrompt, PlayRequest
from psigrad.language.models.language_model import LanguageModel
from psigrad.language.rollout.types import Sampler, SamplingParams, Trajectory
from psigrad.processes.workers.worker_pool import Lost, PoolLimits, WorkerPool
from psigrad_serve.agents.agent_session import Session
from psigrad_serve.agents.agent_worker import AgentCommand, Place, check_agent, decode
from psigrad_serve.agents.token_tree import TokenTree


class Gateway(Protocol):
    """The server that agents query."""

    sessions: dict[str, Session]
    """The running sessions by name."""
    address: str
    tunnel: str
    """The path of the server's Unix socket, for agents without a network; "" if there is none."""

    def serve(self, sampler: Sampler, model: LanguageModel) -> None:
        """Answer with this sampler from now on."""

    def close(self) -> None:
        """Stop answering."""


class AgentPool:
    """A pool of processes that run agents: `workers` (4) at once, each with one session of at most `timeout` (600) seconds."""

    def __init__(self, agent: Callable[..., Any], **limits: Unpack[PoolLimits]) -> None:
        check_agent(agent)
        self.is_program = isinstance(agent, AgentCommand)
        service = "psigrad_serve.agents.agent_worker:service"
        all_limits = PoolLimits(timeout=600.0, workers=4) | limits
        self.workers: WorkerPool[int] = WorkerPool.of(service, agent, decode, kind="agent", **all_limits)

    def run(self, places: Sequence[Place], ended: Callable[[int, float | str | None], None]) -> None:
        """Run one session for each `Place`. When one ends, call `ended(number, reward)`.

        The reward is a number, None if the agent returned none, or a text with the reason why there is none.
        """
        waiting, left = deque(range(len(places))), len(places)
        while left:
            for worker in self.workers.idle():
                if waiting:
                    number = waiting.popleft()
                    self.workers.ask(worker, places[number], [number])
            for _, number, answer in self.workers.answers(wait=True):
                left -= 1
                if isinstance(answer, Lost):
                    late = f"did not end within {self.workers.timeout:g} s (agent_timeout)"
                    answer = f"the agent: {f'its process died ({answer.status})' if answer.status else f'it {late}'}"
                ended(number, answer)

    def close(self) -> None:
        """Kill the workers."""
        self.workers.close()


@dataclass(frozen=True)
class Agents:
    """The `Player` whose rollouts are sessions of agents: the pool that runs them, their server, and the limit on requests."""

    pool: AgentPool
    gateway: Gateway
    most: int = 64

    def play(
        self, sampler: Sampler, prompts: Sequence[PlayedPrompt], params: SamplingParams, asked: PlayRequest
    ) -> list[Trajectory]:
        """Run `asked.num_generations` sessions for each prompt, and return their trajectories in order.

        The agent's reward is placed on the session's last sampled token. A session has no reward, but a recorded reason, if it
        crashes, times out, or sends no request or too many. Log-probs are recomputed by a forward pass, so that they don't depend
        on the order of requests.
        """
        sessions = [
            Session(index, k, row, TokenTree(asked.seed_of(place, k), ids), params, asked.model.tokenizer, self.most)
            for place, (index, ids, row) in enumerate(prompts)
            for k in range(asked.num_generations)
        ]
        names = [secrets.token_hex(12) for _ in sessions]
        rewards: dict[int, float | None] = {}
        self.gateway.serve(sampler, asked.model)
        self.gateway.sessions |= dict(zip(names, sessions, strict=True))

        def ended(number: int, reward: float | str | None) -> None:
            session = sessions[number]
            session.over = True
            if isinstance(reward, str):
                session.fault = session.fault or reward
            elif reward is None and asked.needs_reward:
                session.fault = session.fault or "the agent returned no reward, and the run has no reward function"
            else:
                rewards[number] = reward

        try:
            self.pool.run([self._place(session, name) for session, name in zip(sessions, names, strict=True)], ended)
        finally:
            for name in names:
                self.gateway.sessions.pop(name, None)
        made = [_rewarded(s.trajectory(asked.version), rewards.get(n)) for n, s in enumerate(sessions)]
        return settle(sampler, made, params)

    def _place(self, session: Session, name: str) -> Place:
        row = to_agent_row(session.row, as_json=self.pool.is_program)
        return Place(row, f"{self.gateway.address}/s/{name}/v1", name, self.gateway.tunnel)

    def close(self) -> None:
        """Stop the agents and the server."""
        self.pool.close()
        self.gateway.close()


def _rewarded(trajectory: Trajectory, reward: float | None) -> Trajectory:
    if reward is None or not trajectory.completion.ids:
        return trajectory
    last = max(place for place, own in enumerate(trajectory.mask) if own)
    return replace(trajectory, step_rewards=((last, reward),))
