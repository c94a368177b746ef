"""Episodes of several turns: the policy's sampled tokens, the environment's tokens, and a mask of the policy's tokens.

A long observation is cut to a bounded number of characters before it is tokenised.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from psigrad import seeds
from psigrad.errors import UserError
from psigrad.language import images
from psigrad.language.data.dataset_rows import Row
from psigrad.language.data.image_rows import observation_text
from psigrad.language.data.templates import Reading, decode, prompt_ids
from psigrad.language.episodes.environments import Fault, Message, Observation, Opening, Playing, Step
from psigrad.language.episodes.episode_history import EpisodeHistory, as_messages
from psigrad.language.episodes.players import PlayedPrompt, PlayRequest
from psigrad.language.episodes.tools import CallForm
from psigrad.language.rollout.scoring import transcript_of
from psigrad.language.rollout.types import (
    Branch,
    Completion,
    CompletionSpan,
    Cut,
    FinishReason,
    NextTurn,
    Sampler,
    SamplingParams,
    Trajectory,
)

# The wait for further answers before the next round: (a share of the previous round's time, the minimum in seconds).
LINGER = (0.1, 0.02)
# The largest difference of log-probs, in nats, that a different order of summation explains.
ROUNDING = 1e-3


@dataclass(frozen=True)
class Episodes:
    """The settings of episodes: the environments, the limits of turns and tokens, and the syntax of tool calls."""

    playing: Playing
    max_turns: int = 8
    max_turn_length: int = 0
    """The limit of a turn's tokens; `SamplingParams.max_tokens` then limits all turns together. 0: `max_tokens` limits each."""
    max_observation_length: int = 0
    """The limit of tokens in an environment's answer; 0: as many as fit."""
    together: bool = False
    """True if each round of turns starts only when all episodes have their answers."""
    form: CallForm = field(default_factory=CallForm)
    """The syntax of the policy's tool calls."""

    def limits(self, params: SamplingParams, max_length: int) -> tuple[EpisodeLimits, SamplingParams]:
        """Return the limits of episodes with at most `max_length` tokens each, and the sampling parameters of one turn."""
        total = params.max_tokens if self.max_turn_length else 0
        params = replace(params, max_tokens=min(self.max_turn_length or params.max_tokens, params.max_tokens))
        return EpisodeLimits(params.max_tokens, self.max_observation_length, total, max_length, self.max_turns), params

    def play(
        self, sampler: Sampler, prompts: Sequence[PlayedPrompt], params: SamplingParams, asked: PlayRequest
    ) -> list[Trajectory]:
        """Play the episodes of a step by the function `play`, within the model's context length. See `Player`."""
        how: dict[str, Any] = {"num_generations": asked.num_generations, "seed_of": asked.seed_of, "version": asked.version}
        model = asked.model
        return play(self, sampler, prompts, params, tokenizer=model.tokenizer, max_length=model.max_length, **how)


@dataclass
class LiveEpisode:
    """The state of one episode. `ids` are all tokens after the prompt, and `mask` is True for those that the policy sampled."""

    index: int
    k: int
    row: Row
    prompt: tuple[int, ...]
    seed: int
    history: EpisodeHistory
    ids: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    sampling_logprobs: list[float] = field(default_factory=list)
    rewards: list[tuple[int, float]] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    policy_turns: list[str] = field(default_factory=list)
    cuts: list[Cut] = field(default_factory=list)
    finish_reason: FinishReason = "length"
    over: bool = False
    reason: str = ""
    branches: list[Branch] = field(default_factory=list)
    seat: int | None = None
    heard: tuple[int, ...] = ()
    """The tokens to read before the policy's next turn. They extend its context, or replace it if `anew` is True."""
    anew: bool = False

    @property
    def next_turn(self) -> NextTurn:
        """The input from which the policy's next turn is sampled."""
        turn = len(self.policy_turns)
        return NextTurn(self.heard, self.seed if turn == 0 else seeds.derive(self.seed, "turn", turn), self.anew)

    @property
    def context(self) -> tuple[int, ...]:
        """All tokens of the policy's context so far, prompt included."""
        start, prompt = self.branches[-1] if self.branches else (0, self.prompt)
        return (*prompt, *self.ids[start:])

    @property
    def used(self) -> int:
        """The number of tokens in the policy's context."""
        start, prompt = self.branches[-1] if self.branches else (0, self.prompt)
        return len(prompt) + len(self.ids) - start

    def say(self, completion: Completion, text: str) -> None:
        """Add a turn of the policy."""
        self.history.say((self.heard or self.prompt)[-1], completion.ids, text)
        self.ids += completion.ids
        self.mask += [True] * len(completion.ids)
        self.logprobs += completion.logprobs
        self.sampling_logprobs += completion.sampling_logprobs
        self.finish_reason = completion.finish_reason
        self.policy_turns.append(text)
        self.messages.append({"role": "assistant", "content": text})

    def hear(self, answer: Step | Fault, limits: EpisodeLimits) -> None:
        """Add the environment's answer. The episode ends if the answer says so, if the turn was cut, or if no turn can follow."""
        was_cut, self.finish_reason = self.finish_reason == "length", "length"
        if isinstance(answer, Step):
            answer = mark_images(self.history.tokenizer, answer.observation, answer)
        if isinstance(answer, Fault):
            self.over, self.reason = True, answer.reason
            return
        self.rewards.append((len(self.ids) - 1, answer.reward))
        if answer.done or was_cut:
            self.over, self.finish_reason = True, "stop" if answer.done else "length"
            return
        self.observe(answer.observation, limits)

    def observe(self, observation: Observation, limits: EpisodeLimits) -> None:
        """Add an observation, cut to leave room for the next turn. End the episode if no room is left or no turn may follow."""
        bare = self.history.read(cut(observation, 0))
        used, past = (0, len(bare.ids)) if bare.restart else (self.used, 0)
        turn = len(self.policy_turns)
        readings: list[Reading] = []

        def render(said: Observation) -> list[int]:
            readings.append(self.history.read(said))
            return readings[-1].ids

        fitted = limits.fit(render, observation, used, turn, self.cuts, past)
        if fitted is None:
            self.over = True
            return
        self.messages += as_messages(fitted[1])
        self.history.hear(fitted[1], readings[-1])
        self._read(readings[-1])
        spent = limits.total and sum(self.mask) + limits.turn > limits.total
        self.over = bool(spent) or len(self.policy_turns) == limits.turns

    def _read(self, reading: Reading) -> None:
        self.heard, self.anew = tuple(reading.ids), reading.restart
        if self.anew:
            self.branches.append(Branch(len(self.ids), self.heard))
            return
        self.ids += self.heard
        self.mask += [False] * len(self.heard)
        self.logprobs += [0.0] * len(self.heard)
        self.sampling_logprobs += [0.0] * len(self.heard)


@dataclass(frozen=True)
class EpisodeLimits:
    """The maximum tokens in a turn, an observation, all turns together (0: no limit) and the context, and the maximum turns."""

    turn: int
    observation: int
    total: int
    context: int
    turns: int

    def fit(
        self,
        render: Callable[[Observation], Sequence[int]],
        said: Observation,
        used: int,
        turn: int,
        cuts: list[Cut],
        past: int = 0,
    ) -> tuple[Sequence[int], Observation] | None:
        """Return (tokens, observation), cut so that another turn fits after the `used` tokens of the context and these tokens.

        `render` returns the tokens of an observation, of which `past` are not its own but the conversation's. Describe a cut
        in `cuts`. Return None if nothing fits.
        """
        room = self.context - used - self.turn
        limit, why = (
            room,
            f"of the context's {self.context} tokens, {max(0, room)} are left besides {self.turn} reserved for the next turn",
        )
        if 0 < self.observation < room - past:
            limit, why = past + self.observation, f"max_observation_length is {self.observation}"
        heard = fit(render, said, limit)
        if heard is None or heard[1] != said:
            whole = f"{length(said)} characters: {why}"
            cuts.append(Cut(turn, "dropped" if heard is None else "cut", whole))
        return heard


def play(
    rules: Episodes,
    sampler: Sampler,
    prompts: Sequence[PlayedPrompt],
    params: SamplingParams,
    *,
    num_generations: int,
    seed_of: Callable[[int, int], int],
    tokenizer: Any,
    version: int,
    max_length: int,
) -> list[Trajectory]:
    """Return `num_generations` trajectories for each (index, prompt ids, row), in order.

    Prompt and episode have at most `max_length` tokens together. An episode continues as soon as its environment has answered.
    The turns of ready episodes are sampled together while other environments work. If the engine supports it, they join a batch
    that is being sampled. An episode ends as truncated if a turn is cut by its length limit, or at `max_turns` or `max_length`.
    An environment's answer is cut if it leaves no room for another turn. Each turn's reward is placed on its last token.
    """
    playing = rules.playing
    limits, params = rules.limits(params, max_length)
    episodes = _begin(rules, prompts, num_generations, seed_of, tokenizer, limits)
    dialogue = sampler.dialogue([e.prompt for e in episodes], params)
    ready, waiting = [i for i, e in enumerate(episodes) if not e.over], set[int]()

    def hear(answers: Mapping[int, Any]) -> list[int]:
        for i, answer in answers.items():
            episodes[i].hear(answer, limits)
        waiting.difference_update(answers)
        return sorted(i for i in answers if not episodes[i].over)

    if dialogue.joins and not rules.together:
        dialogue.more = lambda: {i: episodes[i].next_turn for i in hear(playing.answers(0.0))}
    while ready or waiting:
        started = time.monotonic()
        for i, completion in dialogue.turns({i: episodes[i].next_turn for i in ready}) if ready else ():
            text = decode(tokenizer, completion.ids)
            episodes[i].say(completion, text)
            playing.ask({i: text})
            waiting.add(i)
        linger = 0.0 if dialogue.joins else max(LINGER[0] * (time.monotonic() - started), LINGER[1])
        ready = hear(playing.wait(len(waiting), math.inf if rules.together else linger))
    trajectories = [episode_trajectory(e, version, tokenizer) for e in episodes]
    return settle(sampler, trajectories, params) if playing.paced and not rules.together else trajectories


def settle(sampler: Sampler, trajectories: list[Trajectory], params: SamplingParams) -> list[Trajectory]:
    """Return the trajectories with log-probs recomputed by `sampler.log_probs`, which do not depend on how turns were batched.

    Rounding differs between batches, so the same seed would otherwise not give the same bits. A trajectory keeps the log-probs of
    sampling if the new ones differ by more than rounding, so that training sees the disagreement. All keep them if the sampler
    cannot recompute them (`log_probs` returns None), and `sampling_logprobs` of a filtered distribution are kept too.
    """
    logps = [[0.0] * len(t.completion.ids) for t in trajectories]
    for _, group in itertools.groupby(enumerate(trajectories), lambda one: (one[1].row, one[1].prompt_ids)):
        behind: dict[tuple[int, ...], list[tuple[int, CompletionSpan]]] = {}
        for n, trajectory in group:
            for context in trajectory.contexts:
                behind.setdefault(context.prompt_ids, []).append((n, context))
        for prompt, own in behind.items():
            known = [(n, context) for n, context in own if context.ids]
            found = sampler.log_probs(prompt, [context.ids for _, context in known], params) if known else []
            if found is None:
                return trajectories
            for (n, context), values in zip(known, found, strict=True):
                logps[n][context.start : context.start + len(context.ids)] = values
    return [_with_log_probs(t, own) if own else t for t, own in zip(trajectories, logps, strict=True)]


def _with_log_probs(trajectory: Trajectory, logps: Sequence[float]) -> Trajectory:
    held = trajectory.completion
    own = tuple(logp if chosen else 0.0 for logp, chosen in zip(logps, trajectory.mask, strict=True))
    if max(abs(a - b) for a, b in zip(own, held.logprobs, strict=True)) > ROUNDING:
        return trajectory
    sampling = own if held.sampling_logprobs == held.logprobs else held.sampling_logprobs
    return replace(trajectory, completion=replace(held, logprobs=own, sampling_logprobs=sampling))


def _begin(
    rules: Episodes,
    prompts: Sequence[PlayedPrompt],
    count: int,
    seed_of: Callable[[int, int], int],
    tokenizer: Any,
    limits: EpisodeLimits,
) -> list[LiveEpisode]:
    """Start `count` episodes of each prompt, with `reset`'s observation after the prompt. It must be equal within a group."""
    shown = [{"prompt": images.remove_marks(row.dataset_prompt), **row.columns} for _, _, row in prompts for _ in range(count)]
    openings_of_all = [mark_images(tokenizer, opening) for opening in rules.playing.begin(shown)]
    episodes: list[LiveEpisode] = []
    for place, (index, ids, row) in enumerate(prompts):
        openings = openings_of_all[place * count : (place + 1) * count]
        heard = [opening for opening in openings if not isinstance(opening, Fault)]
        if any(opening != heard[0] for opening in heard):
            raise UserError(f"{row.source}: reset() returned different texts for the same row; make them depend only on the row.")
        cuts: list[Cut] = []
        opened = row
        if heard and heard[0] is not None:
            if isinstance(heard[0], Opening):
                raise UserError(
                    "reset() returned a seat, but the environment has no attribute `seats`; set `seats` to the number of seats."
                )
            fitted = limits.fit(partial(render_opening, tokenizer, row), heard[0], 0, 0, cuts)
            if fitted is None:
                openings = [Fault(f"the text that reset() returned is too long ({cuts[0].reason})")] * count
            else:
                ids, opened = tuple(fitted[0]), opened_row(row, fitted[1])
        history = EpisodeHistory.of(tokenizer, opened, rules.form)
        for k, opening in enumerate(openings):
            episode = LiveEpisode(index, k, row, ids, seed_of(place, k), history.copy(), cuts=list(cuts))
            if isinstance(opening, Fault):
                episode.over, episode.reason = True, opening.reason
            episodes.append(episode)
    return episodes


def mark_images(tokenizer: Any, said: Any, step: Step | None = None) -> Any:
    """Return the observation `said`, or `step` with it, with marks in place of images; a `Fault` if an image cannot be read."""
    image_format = images.image_format_of(tokenizer)
    try:
        read: Any = said if said is None or isinstance(said, Fault) else observation_text(said)
        if image_format is not None and image_format.placeholder in str(read):
            raise ValueError(f"has the text {image_format.placeholder!r}, which marks the place of an image; remove it")
    except ValueError as error:
        return Fault(f"the environment's observation {error}")
    return read if step is None else step._replace(observation=read)


def render_opening(tokenizer: Any, row: Row, opening: Observation) -> list[int]:
    """Return the tokens of a row's prompt, followed by the environment's first observation."""
    return prompt_ids(tokenizer, opened_row(row, opening))


def opened_row(row: Row, opening: Observation) -> Row:
    """Return the row with the environment's first observation as a message, or appended to a prompt that was text."""
    prompt: Any = row.prompt
    if isinstance(prompt, str):
        return replace(row, prompt=prompt + str(opening))
    if row.plain_prompt is not None and isinstance(opening, str):
        return replace(row, prompt=[*prompt[:-1], {**prompt[-1], "content": row.plain_prompt + opening}])
    return replace(row, prompt=[*(prompt or []), *as_messages(opening)])


def episode_trajectory(episode: LiveEpisode, version: int, tokenizer: Any) -> Trajectory:
    """Return the trajectory of a finished episode, for training."""
    completion = Completion(
        ids=tuple(episode.ids),
        logprobs=tuple(episode.logprobs),
        sampling_logprobs=tuple(episode.sampling_logprobs),
        finish_reason=episode.finish_reason,
        seed=episode.seed,
    )
    return Trajectory(
        row=episode.index,
        k=episode.k,
        prompt_ids=episode.prompt,
        completion=completion,
        version=version,
        text=images.label_images(transcript_of(episode.messages)) if episode.branches else decode(tokenizer, episode.ids),
        reason=episode.reason,
        mask=tuple(episode.mask),
        step_rewards=tuple(episode.rewards),
        seat=episode.seat,
        turns=len(episode.policy_turns),
        messages=() if isinstance(episode.row.prompt, str) else tuple(episode.messages),
        cuts=tuple(episode.cuts),
        policy_turns=tuple(episode.policy_turns),
        branches=tuple(branch for branch in episode.branches if branch.start < len(episode.ids)),
    )


# The maximum number of characters read from an answer per available token. Text has about four per token, code two or three.
CHARACTERS = 16
# Marks the place of the text that was cut.
MARK = "…"


def fit(
    render: Callable[[Observation], Sequence[int]], said: Observation, limit: int
) -> tuple[Sequence[int], Observation] | None:
    """Return (tokens, observation), cut to at most `limit` tokens, or None if nothing fits. `render` makes the tokens."""
    size = length(said)
    kept = min(size, CHARACTERS * limit)
    while limit > 0 and (kept > 0 or kept == size):
        shown = said if kept == size else cut(said, kept)
        ids = render(shown)
        if len(ids) <= limit:
            return ids, shown
        kept = min(kept - 1, kept * limit // len(ids))
    return None


def length(said: Observation) -> int:
    """Return the number of characters of an observation, summed over its messages."""
    return len(said) if isinstance(said, str) else sum(len(_text(message)) for message in said)


def cut(said: Observation, kept: int) -> Observation:
    """Return the first `kept` characters, then `MARK`. Messages after the cut become a `MARK`, as each call needs an answer."""
    if isinstance(said, str):
        return _clip(said, kept) + MARK
    shown: list[Message] = []
    for message in said:
        text = _text(message)
        whole = len(text) <= kept
        shown.append(message if whole else {**message, "content": _clip(text, kept) + MARK})
        kept = max(0, kept - len(text))
    return shown


def _clip(text: str, kept: int) -> str:
    """Return the first `kept` characters. If the cut would be inside an image's mark, it is made before the mark."""
    torn = next((mark for mark in images.MARK.finditer(text) if mark.start() < kept < mark.end()), None)
    return text[: kept if torn is None else torn.start()]


def _text(message: Message) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else ""
