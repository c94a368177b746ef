"""Episodes of several turns: the policy's tokens as they were sampled, the environment's between them, and who wrote which."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from psigrad import seeds
from psigrad.data.dataset_rows import Row
from psigrad.data.templates import decode, observation_ids, prompt_ids
from psigrad.errors import UserError
from psigrad.rollout.environments import Environment, Factory, Message, Observation
from psigrad.rollout.types import Completion, Request, Sampler, SamplingParams, Trajectory


@dataclass(frozen=True)
class Episodes:
    """How episodes are played: who answers, and after how many turns they are cut."""

    factory: Factory
    max_turns: int = 8


@dataclass
class _Episode:
    """One episode under way. `ids` are all tokens behind the prompt, `mask` says which of them the policy chose."""

    environment: Environment
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

    def say(self, completion: Completion) -> None:
        """A turn of the policy."""
        self.turns += 1
        self.ids += completion.ids
        self.mask += [True] * len(completion.ids)
        self.logprobs += completion.logprobs
        self.sampling_logprobs += completion.sampling_logprobs

    def hear(self, ids: Sequence[int]) -> None:
        """A turn of the environment."""
        self.ids += ids
        self.mask += [False] * len(ids)
        self.logprobs += [0.0] * len(ids)
        self.sampling_logprobs += [0.0] * len(ids)

    def fail(self, error: Exception) -> None:
        """The environment broke: nobody's reward."""
        self.over, self.reason = True, f"the environment raised {type(error).__name__}: {error}"


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
    episodes = [e for i, prompt in enumerate(prompts) for e in _begun(rules, prompt, i, num_generations, seed_of, tokenizer)]
    rows = {index: row for index, _, row in prompts}
    for turn in range(rules.max_turns):
        live = [e for e in episodes if not e.over]
        if not live:
            break
        for episode, completion in zip(live, _turn(sampler, live, params, turn), strict=True):
            episode.say(completion)
            _answer(episode, completion, tokenizer, rows[episode.index])
            room = max_length - len(episode.prompt) - len(episode.ids)
            if not episode.over and (room < params.max_tokens or turn + 1 == rules.max_turns):
                episode.over = True
    return [_trajectory(e, version, tokenizer) for e in episodes]


def _begun(
    rules: Episodes,
    prompt: tuple[int, tuple[int, ...], Row],
    place: int,
    count: int,
    seed_of: Callable[[int, int], int],
    tokenizer: Any,
) -> list[_Episode]:
    """The episodes of one prompt, after `reset`; what that says is read behind the prompt, and is the same for the group."""
    index, ids, row = prompt
    made = []
    openings = []
    for k in range(count):
        episode = _Episode(rules.factory(), index, k, ids, seed_of(place, k), not isinstance(row.prompt, str))
        try:
            openings.append(episode.environment.reset({"prompt": row.prompt, **row.columns}))
        except Exception as error:
            episode.fail(error)
        made.append(episode)
    if openings and openings[0] is not None:
        opened = tuple(prompt_ids(tokenizer, replace(row, prompt=_opened(row.prompt, openings[0]))))
        made = [replace(episode, prompt=opened) for episode in made]
    if any(opening != openings[0] for opening in openings):
        raise UserError(
            f"{row.source}: reset() returned different texts for the same row; what an environment does at reset "
            "may depend only on the row."
        )
    return made


def _opened(prompt: Any, opening: Observation) -> Any:
    """The prompt with the environment's first words."""
    if isinstance(prompt, str):
        return prompt + str(opening)
    return [*prompt, *([{"role": "user", "content": opening}] if isinstance(opening, str) else opening)]


def _turn(sampler: Sampler, live: Sequence[_Episode], params: SamplingParams, turn: int) -> list[Completion]:
    """The next completion of every live episode; on the first turn a group shares its prompt."""
    requests: list[Request] = []
    for episode in live:
        context = (*episode.prompt, *episode.ids)
        seed = episode.seed if turn == 0 else seeds.derive(episode.seed, "turn", turn)
        if requests and requests[-1].prompt_ids == context:
            requests[-1] = Request(context, (*requests[-1].seeds, seed))
        else:
            requests.append(Request(context, (seed,)))
    return [completion for group in sampler.sample(requests, params) for completion in group]


def _answer(episode: _Episode, completion: Completion, tokenizer: Any, row: Row) -> None:
    """Let the environment answer a turn."""
    text = decode(tokenizer, completion.ids)
    episode.messages.append({"role": "assistant", "content": text})
    try:
        observation, reward, done = episode.environment.step(text)
    except Exception as error:
        episode.fail(error)
        return
    if not math.isfinite(reward):
        episode.over, episode.reason = True, f"the environment's reward is {reward}"
        return
    episode.rewards.append((len(episode.ids) - 1, float(reward)))
    cut = completion.finish_reason == "length"
    if done or cut:
        episode.over = True
        episode.finish_reason = "stop" if done else "length"
        return
    said = [{"role": "user", "content": observation}] if isinstance(observation, str) else observation
    episode.messages += said
    episode.hear(observation_ids(tokenizer, row, observation))


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


def environment_rows(factory: Any, count: int, seed: int) -> list[Mapping[str, Any]] | None:
    """The rows that an environment brings along, where it does."""
    make = getattr(factory, "rows", None)
    return list(make(count, seed)) if callable(make) else None
