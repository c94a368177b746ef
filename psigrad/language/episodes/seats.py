"""Games of several seats (players). Each seat is an episode, and only the seats of the policy yield trajectories.

All seats of a game share one environment. A seat reads its own observations alone, never another seat's. The trajectories of one
seat in the games of one row are a group, within which advantages compare them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from psigrad import seeds
from psigrad.errors import UserError
from psigrad.language import images
from psigrad.language.data.dataset_rows import Row
from psigrad.language.data.templates import decode
from psigrad.language.episodes.environments import Fault, Observation, Opening, Playing, Step
from psigrad.language.episodes.episode_history import EpisodeHistory, as_messages
from psigrad.language.episodes.episodes import (
    EpisodeLimits,
    Episodes,
    LiveEpisode,
    episode_trajectory,
    mark_images,
    opened_row,
    render_opening,
    settle,
)
from psigrad.language.episodes.players import PlayedPrompt, PlayRequest
from psigrad.language.rollout.types import Cut, NextTurn, Sampler, SamplingParams, Trajectory


class Opponents(Protocol):
    """The source of opponents for self-play: earlier versions of the policy."""

    def pick(self, seed: int, version: int) -> Sampler | None:
        """Return the sampler of an opponent for one prompt in step `version` + 1; None if the policy plays against itself."""


@dataclass(frozen=True)
class Games:
    """The `Player` of games with several seats. `rules` are the settings of their episodes."""

    rules: Episodes
    seats: int
    opponents: Opponents | None = None

    @property
    def playing(self) -> Playing:
        """The runner of the environments."""
        return self.rules.playing

    def play(
        self, sampler: Sampler, prompts: Sequence[PlayedPrompt], params: SamplingParams, asked: PlayRequest
    ) -> list[Trajectory]:
        """Play the games of a step and return the trajectories of the policy's seats. See `Player`.

        Against itself, the policy plays `num_generations` games per prompt, and all seats yield trajectories. Against an earlier
        version, it plays `num_generations` games in each seat, and only this seat yields trajectories.
        """
        seed_of, tokenizer = asked.seed_of, asked.model.tokenizer
        limits, params = self.rules.limits(params, asked.model.max_length)
        games: list[SeatedGame] = []
        for place, (index, ids, row) in enumerate(prompts):
            opponent = None if self.opponents is None else self.opponents.pick(seed_of(place, 0), asked.version)
            for learner in (None,) if opponent is None else range(self.seats):
                samplers = [sampler if learner in (None, seat) else opponent or sampler for seat in range(self.seats)]
                for k in range(asked.num_generations):
                    seed = seed_of(place, k) if learner is None else seeds.derive(seed_of(place, k), "learner", learner)
                    seats = [self._seat(index, k, row, ids, seed, seat, tokenizer) for seat in range(self.seats)]
                    games.append(SeatedGame(seats, samplers, learner))
        entries = Entries(tokenizer, limits)
        self._begin(games, entries)
        self._play(games, params, entries)
        trajectories = []
        for start in range(0, len(games), asked.num_generations):
            group = games[start : start + asked.num_generations]
            for seat in range(self.seats):
                trajectories += [
                    episode_trajectory(game.seats[seat], asked.version, tokenizer)
                    for game in group
                    if game.learner in (None, seat)
                ]
        return settle(sampler, trajectories, params) if self.playing.paced and not self.rules.together else trajectories

    def _seat(self, index: int, k: int, row: Row, ids: tuple[int, ...], seed: int, seat: int, tokenizer: Any) -> LiveEpisode:
        history = EpisodeHistory(tokenizer, row, self.rules.form, [], "")
        return LiveEpisode(index, k, row, ids, seeds.derive(seed, "seat", seat), history, seat=seat)

    def _begin(self, games: Sequence[SeatedGame], entries: Entries) -> None:
        """Start all games. Raise `UserError` if the games of one row do not start with the same observation."""
        rows = [game.seats[0].row for game in games]
        openings = self.playing.begin([{"prompt": images.remove_marks(row.dataset_prompt), **row.columns} for row in rows])
        first: dict[int, Opening] = {}
        for game, row, opening in zip(games, rows, openings, strict=True):
            if not isinstance(opening, Opening):
                reason = opening.reason if isinstance(opening, Fault) else f"reset() returned {opening!r} without a seat"
                game.end(reason=reason)
            elif opening != first.setdefault(game.seats[0].index, opening):
                raise UserError(
                    f"{row.source}: reset() returned different texts for the same row; make them depend only on the row."
                )
            else:
                game.turn_to(opening.seat, opening.observation, entries)

    def _play(self, games: Sequence[SeatedGame], params: SamplingParams, entries: Entries) -> None:
        """Play all games to their end. The turns of seats with the same sampler are sampled together when they are ready."""
        owned: dict[int, tuple[Sampler, list[tuple[int, int]]]] = {}
        for number, game in enumerate(games):
            for seat, one in enumerate(game.samplers):
                owned.setdefault(id(one), (one, []))[1].append((number, seat))
        dialogues = [
            (one.dialogue([games[number].seats[seat].prompt for number, seat in places], params), places)
            for one, places in owned.values()
        ]
        ready, waiting = {n for n, game in enumerate(games) if not game.over}, 0
        while ready or waiting:
            for dialogue, places in dialogues:
                wanted: dict[int, NextTurn] = {
                    i: games[number].seats[seat].next_turn
                    for i, (number, seat) in enumerate(places)
                    if number in ready and games[number].acting == seat
                }
                for i, completion in dialogue.turns(wanted) if wanted else ():
                    number, seat = places[i]
                    text = decode(entries.tokenizer, completion.ids)
                    games[number].seats[seat].say(completion, text)
                    self.playing.ask({number: text})
                    waiting += 1
            answers = self.playing.wait(waiting, math.inf if self.rules.together else 0.02)
            for number, answer in answers.items():
                games[number].hear(answer, entries)
            waiting -= len(answers)
            ready = {number for number in answers if not games[number].over}


class Entries:
    """A cache of seats' prompts with their first observations, so that equal ones are rendered once."""

    def __init__(self, tokenizer: Any, limits: EpisodeLimits) -> None:
        self.tokenizer, self.limits = tokenizer, limits
        self._known: dict[tuple[int, str], LiveEpisode] = {}

    def enter(self, seat: LiveEpisode, said: Observation) -> None:
        """Set a seat's prompt: its row's prompt, followed by its first observation. The seat is over if this does not fit."""
        key = (id(seat.row), repr(said))
        if key not in self._known:
            cuts: list[Cut] = []
            fitted = self.limits.fit(partial(render_opening, self.tokenizer, seat.row), said, 0, 0, cuts)
            ids, shown = fitted or ((), said)
            history = EpisodeHistory.of(self.tokenizer, opened_row(seat.row, shown), seat.history.form)
            messages = as_messages(shown)
            self._known[key] = replace(
                seat, prompt=tuple(ids), history=history, messages=messages, cuts=cuts, over=fitted is None
            )
        known = self._known[key]
        seat.prompt = seat.heard = known.prompt
        seat.anew, seat.over, seat.history = True, known.over, known.history.copy()
        seat.messages, seat.cuts = [*known.messages], [*known.cuts]


@dataclass
class SeatedGame:
    """The state of one game. `learner` is the only seat that yields a trajectory; None: all seats do."""

    seats: list[LiveEpisode]
    samplers: list[Sampler]
    learner: int | None
    acting: int = 0

    @property
    def over(self) -> bool:
        """True if no seat acts any more."""
        return self.seats[0].over

    def hear(self, answer: Step | Fault, entries: Entries) -> None:
        """Give every seat its reward, and the next seat its observation.

        A turn that was cut at the length limit does not end the game, because the environment has judged it.
        """
        if isinstance(answer, Fault):
            self.end(reason=answer.reason)
            return
        for seat, reward in zip(self.seats, answer.rewards, strict=True):
            if reward or seat.seat == self.acting:
                seat.rewards.append((max(len(seat.ids) - 1, 0), reward))
        self.seats[self.acting].finish_reason = "length"
        if answer.done:
            self.end(done=True)
        else:
            self.turn_to(answer.seat, answer.observation, entries)

    def turn_to(self, number: int, said: Observation, entries: Entries) -> None:
        """Make seat `number` the acting one, and give it the observation `said`.

        The game ends as truncated if there is no room for the seat's turn, or if the seat has had its last one.
        """
        self.acting, seat = number, self.seats[number]
        read = mark_images(entries.tokenizer, said)
        if isinstance(read, Fault):
            self.end(reason=read.reason)
            return
        if seat.policy_turns:
            seat.observe(read, entries.limits)
        else:
            entries.enter(seat, read)
        if seat.over:
            self.end()

    def end(self, *, done: bool = False, reason: str = "") -> None:
        """End the game for all seats."""
        for seat in self.seats:
            seat.over, seat.reason, seat.finish_reason = True, reason, "stop" if done else "length"
