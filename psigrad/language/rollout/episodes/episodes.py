"""Episodes of several turns: the policy's tokens as they were sampled, the environment's between them, and who wrote which."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from psigrad import seeds
from psigrad.errors import UserError
from psigrad.language.data.dataset_rows import Row
from psigrad.language.data.templates import decode, observation_ids, prompt_ids
from psigrad.language.rollout.episodes.environments import Fault, Message, Observation, Playing, Step
from psigrad.language.rollout.types import Completion, Sampler, SamplingParams, Trajectory


@dataclass(frozen=True)
class Episodes:
    """How episodes are played: who answers, and after how many turns they are cut."""

    playing: Playing
    max_turns: int = 8


@dataclass
class _Episode:
    """One episode under way. `ids` are all tokens behind the prompt, `mask` says which of them the policy chose."""

    index: int
    k: int
    prompt: tuple[int, ...]
    seed: int
    conversation: bool
    ids: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    sampling_logprobs: list[float] = field(default_factory=list)
    rewards: list[tuple[int, float]] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    finish_reason: str = "length"
    over: bool = False
    reason: str = ""
    turns: int = 0
    answered: tuple[int, ...] = ()
    """What the environment said since the policy's last turn."""

    def say(self, completion: Completion) -> None:
        """A turn of the policy."""
        self.turns += 1
        self.ids += completion.ids
        self.mask += [True] * len(completion.ids)
        self.logprobs += completion.logprobs
        self.sampling_logprobs += completion.sampling_logprobs

    def hear(self, ids: Sequence[int]) -> None:
        """A turn of the environment."""
        self.answered = tuple(ids)
        self.ids += ids
        self.mask += [False] * len(ids)
        self.logprobs += [0.0] * len(ids)
        self.sampling_logprobs += [0.0] * len(ids)


def play(
    rules: Episodes,
    sampler: Sampler,
    prompts: Sequence[tuple[int, tuple[int, ...], Row]],
    params: SamplingParams,
    *,
    num_generations: int,
    seed_of: Callable[[int, int], int],
    tokenizer: Any,
    version: int,
    max_length: int,
) -> list[Trajectory]:
    """`num_generations` episodes from each (index, prompt ids, row), in order; `max_length` bounds prompt and episode together.

    All live episodes take their turns together. A turn that the length limit cut, `max_turns` and `max_length` end an episode as
    truncated. Each turn's reward stands on its last token.
    """
    episodes = _begin(rules.playing, prompts, num_generations, seed_of, tokenizer)
    rows = {index: row for index, _, row in prompts}
    dialogue = sampler.dialogue([e.prompt for e in episodes], params)
    for turn in range(rules.max_turns):
        live = [i for i, e in enumerate(episodes) if not e.over]
        if not live:
            break
        heard = {i: (episodes[i].answered, _seed_of(episodes[i], turn)) for i in live}
        drawn = dialogue.turn(heard)
        texts = {i: decode(tokenizer, drawn[i].ids) for i in live}
        answers = rules.playing.step(texts)
        for i in live:
            episode, completion = episodes[i], drawn[i]
            episode.say(completion)
            _hear(episode, completion, texts[i], answers[i], tokenizer, rows[episode.index])
            room = max_length - len(episode.prompt) - len(episode.ids)
            if not episode.over and (room < params.max_tokens or turn + 1 == rules.max_turns):
                episode.over = True
    return [_trajectory(e, version, tokenizer) for e in episodes]


def _begin(
    playing: Playing,
    prompts: Sequence[tuple[int, tuple[int, ...], Row]],
    count: int,
    seed_of: Callable[[int, int], int],
    tokenizer: Any,
) -> list[_Episode]:
    """`count` episodes of each prompt, after `reset`; what that says is read behind the prompt, and is the same for a group."""
    shown = [{"prompt": row.shown_prompt, **row.columns} for _, _, row in prompts for _ in range(count)]
    said = playing.begin(shown)
    made: list[_Episode] = []
    for place, (index, ids, row) in enumerate(prompts):
        openings = said[place * count : (place + 1) * count]
        heard = [opening for opening in openings if not isinstance(opening, Fault)]
        if any(opening != heard[0] for opening in heard):
            raise UserError(
                f"{row.source}: reset() said different things for one row; an environment may depend only on the row."
            )
        if heard and heard[0] is not None:
            ids = tuple(prompt_ids(tokenizer, replace(row, prompt=_add_opening(row, heard[0]))))
        for k, opening in enumerate(openings):
            episode = _Episode(index, k, ids, seed_of(place, k), not isinstance(row.prompt, str))
            if isinstance(opening, Fault):
                episode.over, episode.reason = True, opening.reason
            made.append(episode)
    return made


def _add_opening(row: Row, opening: Observation) -> Any:
    """The prompt with the environment's first words, which join a prompt that is text in the dataset."""
    prompt: Any = row.prompt
    if isinstance(prompt, str):
        return prompt + str(opening)
    if row.plain_prompt is not None and isinstance(opening, str):
        return [*prompt[:-1], {**prompt[-1], "content": row.plain_prompt + opening}]
    return [*prompt, *([{"role": "user", "content": opening}] if isinstance(opening, str) else opening)]


def _seed_of(episode: _Episode, turn: int) -> int:
    return episode.seed if turn == 0 else seeds.derive(episode.seed, "turn", turn)


def _hear(episode: _Episode, completion: Completion, text: str, answer: Step | Fault, tokenizer: Any, row: Row) -> None:
    """Enter what the environment answered to a turn."""
    episode.messages.append({"role": "assistant", "content": text})
    if isinstance(answer, Fault):
        episode.over, episode.reason = True, answer.reason
        return
    episode.rewards.append((len(episode.ids) - 1, answer.reward))
    cut = completion.finish_reason == "length"
    if answer.done or cut:
        episode.over = True
        episode.finish_reason = "stop" if answer.done else "length"
        return
    said = answer.observation
    episode.messages += [{"role": "user", "content": said}] if isinstance(said, str) else said
    episode.hear(observation_ids(tokenizer, row, said))


def _trajectory(episode: _Episode, version: int, tokenizer: Any) -> Trajectory:
    completion = Completion(
        ids=tuple(episode.ids),
        logprobs=tuple(episode.logprobs),
        sampling_logprobs=tuple(episode.sampling_logprobs),
        finish_reason="stop" if episode.finish_reason == "stop" else "length",
        seed=episode.seed,
    )
    return Trajectory(
        row=episode.index,
        k=episode.k,
        prompt_ids=episode.prompt,
        completion=completion,
        version=version,
        text=decode(tokenizer, episode.ids),
        reason=episode.reason,
        mask=tuple(episode.mask),
        step_rewards=tuple(episode.rewards),
        turns=episode.turns,
        messages=tuple(episode.messages) if episode.conversation else (),
    )


def returns(trajectory: Trajectory) -> float:
    """The sum of the environment's rewards."""
    return math.fsum(reward for _, reward in trajectory.step_rewards)
