"""The interface `Player`, which plays rollouts of several turns with the policy, and the collector of their trajectories."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from psigrad.language.data.dataset_rows import Row
from psigrad.language.data.templates import decode
from psigrad.language.models.language_model import LanguageModel
from psigrad.language.rollout.collectors import Completions, GroupRequest, TrajectoryCollector
from psigrad.language.rollout.types import Prompt, Sampler, SamplingParams, Trajectory

PlayedPrompt = tuple[int, tuple[int, ...], Row]
"""(index, prompt ids, row)."""


@dataclass(frozen=True)
class PlayRequest(GroupRequest):
    """A request for trajectories of several turns by `model`."""

    model: LanguageModel
    needs_reward: bool = True
    """True if there is no reward but the player's own."""


class Player(Protocol):
    """A producer of rollouts of several turns: local environments and tools, or agents over HTTP (psigrad_serve/agents/)."""

    def play(
        self, sampler: Sampler, prompts: Sequence[PlayedPrompt], params: SamplingParams, asked: PlayRequest
    ) -> list[Trajectory]:
        """Return the trajectories that `asked` requests for each prompt, in order.

        A game of several seats returns that many trajectories for each seat, seat by seat.
        """


@dataclass(frozen=True)
class PlayerCollector:
    """A collector of a player's trajectories (episodes, or sessions of agents). It returns all groups of a step at once."""

    player: Player
    sampler: Sampler
    model: LanguageModel
    needs_reward: bool
    """True if there are no rewards but the player's own."""
    plays: bool = True

    def collect(
        self, prompts: Sequence[Prompt], params: SamplingParams, asked: GroupRequest, cache: Any = None
    ) -> Iterator[list[tuple[int, list[Trajectory]]]]:
        """Yield once, with the trajectories of all prompts: (prompt's position, its trajectories). See `TrajectoryCollector`."""
        play = PlayRequest(asked.num_generations, asked.seed_of, asked.version, self.model, self.needs_reward)
        made = self.player.play(self.sampler, [(p.index, p.ids, p.row) for p in prompts], params, play)
        count = len(made) // len(prompts)
        yield [(i, made[i * count : (i + 1) * count]) for i in range(len(prompts))]

    def snapshot(self) -> PlayerCollector:
        """Return a copy whose sampler has the policy's current weights. See `TrajectoryCollector`."""
        return replace(self, sampler=self.sampler.snapshot())


def collector_of(
    sampler: Sampler, model: LanguageModel, player: Player | None = None, *, needs_reward: bool = False
) -> TrajectoryCollector:
    """Return the collector of a player's episodes, or of single completions if there is no player."""
    if player is not None:
        return PlayerCollector(player, sampler, model, needs_reward)
    return Completions(sampler, partial(decode, model.tokenizer))
