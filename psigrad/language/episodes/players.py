"""The interface `Player`, which plays rollouts of several turns with the policy, and the collector of their trajectories."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from psigrad.language.data.dataset_rows import Row
from psigrad.language.data.templates import decode
from psigrad.language.models.language_model import LanguageModel
from psigrad.language.rollout.collectors import Completions, SeedOf, TrajectoryCollector
from psigrad.language.rollout.types import Prompt, Sampler, SamplingParams, Trajectory


class Player(Protocol):
    """A producer of rollouts of several turns: local environments and tools, or agents over HTTP (psigrad_serve/agents/)."""

    def play(
        self,
        sampler: Sampler,
        prompts: Sequence[tuple[int, tuple[int, ...], Row]],
        params: SamplingParams,
        *,
        num_generations: int,
        seed_of: Callable[[int, int], int],
        model: LanguageModel,
        version: int,
        needs_reward: bool,
    ) -> list[Trajectory]:
        """Return `num_generations` trajectories for each (index, prompt ids, row), in order.

        `seed_of(i, k)` is the seed of the k-th trajectory of the i-th prompt. A game of several seats returns that many
        trajectories for each seat, seat by seat. `needs_reward` is True if there is no reward but the player's own.
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
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        num_generations: int,
        seed_of: SeedOf,
        version: int,
        cache: Any = None,
    ) -> Iterator[list[tuple[int, list[Trajectory]]]]:
        """Yield once, with the trajectories of all prompts: (prompt's position, its trajectories). See `TrajectoryCollector`."""
        made = self.player.play(
            self.sampler,
            [(p.index, p.ids, p.row) for p in prompts],
            params,
            num_generations=num_generations,
            seed_of=seed_of,
            model=self.model,
            version=version,
            needs_reward=self.needs_reward,
        )
        count = len(made) // len(prompts)
        yield [(i, made[i * count : (i + 1) * count]) for i in range(len(prompts))]

    def snapshot(self) -> PlayerCollector:
        """Return a copy whose sampler has the present weights. See `TrajectoryCollector`."""
        return replace(self, sampler=self.sampler.snapshot())


def collector_of(
    sampler: Sampler, model: LanguageModel, player: Player | None = None, *, needs_reward: bool = False
) -> TrajectoryCollector:
    """Return the collector of a player's episodes, or of single completions if there is no player."""
    if player is not None:
        return PlayerCollector(player, sampler, model, needs_reward)
    return Completions(sampler, partial(decode, model.tokenizer))
