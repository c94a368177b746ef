"""What a rollout is: token ids in, token ids out. Text is derived from it for people and verifiers and never comes back."""

from __future__ import annotations

import itertools
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, overload

if TYPE_CHECKING:
    from psigrad.language.models.fused.caches import ActivationCache

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Prompt:
    """One dataset row as training sees it: its index, its tokens, the row itself (text and columns for the rewards), and the
    tokens that the reference reads in place of its own.
    """

    index: int
    ids: tuple[int, ...]
    row: Any
    teacher_ids: tuple[int, ...] = ()


class Prompts(Sequence[Prompt]):
    """The prompts of rows, each made where it is asked for."""

    def __init__(self, rows: Sequence[Any], made: Sequence[Any]) -> None:
        self.rows, self.made = rows, made

    def __len__(self) -> int:
        return len(self.made)

    @overload
    def __getitem__(self, place: int) -> Prompt: ...
    @overload
    def __getitem__(self, place: slice) -> list[Prompt]: ...
    def __getitem__(self, place: int | slice) -> Prompt | list[Prompt]:
        if isinstance(place, slice):
            return [self[i] for i in range(*place.indices(len(self)))]
        index, ids = self.made[place]
        return Prompt(index, tuple(ids), self.rows[index])


@dataclass(frozen=True)
class Request:
    """One prompt and the seeds of the completions wanted for it; `len(seeds)` is the group size."""

    prompt_ids: tuple[int, ...]
    seeds: tuple[int, ...]


@dataclass(frozen=True)
class Completion:
    """One sampled completion.

    `sampling_logprobs[t]` is the log-probability of token t under the exact distribution it was drawn from (after
    temperature, top-k, top-p, min-p); `logprobs[t]` is the policy's own, after temperature only, which is what the trainer
    recomputes.
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    sampling_logprobs: tuple[float, ...]
    finish_reason: FinishReason
    seed: int
    experts: str = ""
    """The experts that each of its tokens but the last was sent to, where that is recorded (`models/experts.py`)."""
    prompt_experts: str = ""
    """Those of the prompt's tokens."""


class DrawnToken(NamedTuple):
    """A sampled token. Its log-probs are those of `Completion`; `top` has the most probable ids with their log-probs."""

    id: int
    logprob: float
    sampling_logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class SamplingParams:
    """The distribution that tokens are drawn from, and when a completion ends.

    The filters act in the order of transformers: temperature, top_k, top_p, min_p. `temperature` 0 is greedy.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, value, ok, expected in (
            ("max_tokens", self.max_tokens, self.max_tokens >= 1, "at least 1"),
            ("temperature", self.temperature, self.temperature >= 0, "0 (greedy) or more"),
            ("top_p", self.top_p, 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("top_k", self.top_k, self.top_k >= 0, "0 (all tokens) or more"),
            ("min_p", self.min_p, 0 <= self.min_p <= 1, "between 0 and 1"),
        ):
            if not ok:
                raise ValueError(f"{name} is {value}; it must be {expected}.")

    @property
    def filtered(self) -> bool:
        """Whether a filter may forbid tokens, so that they are drawn from another distribution than the policy's."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


class Sampler(ABC):
    """Samples completions: the embedded sampler, transformers, vLLM, or a custom one (`language/loading/samplers.py`)."""

    exact: bool = False
    """Whether its log-probs are those of the trainer's own forward pass in float32, to rounding. Then a batch that is trained on
    in several passes need not be run forward again first."""

    central: bool = False
    """Whether one process has it sample for all that train together, instead of each its share."""

    @abstractmethod
    def steps(
        self, requests: list[Request], params: SamplingParams, cache: ActivationCache | None = None
    ) -> Iterator[list[tuple[int, list[Completion]]]]:
        """Sample, and after each step tell the places of the requests that it completed, with their completions.

        A sampler that runs the trainer's own weights may fill `cache` with what it computes.
        """

    def sample(self, requests: list[Request], params: SamplingParams) -> list[list[Completion]]:
        """The completions of each request, in the order of the requests and of their seeds."""
        done = dict(complete for step in self.steps(requests, params) for complete in step)
        return [done[place] for place in range(len(requests))]

    def dialogue(self, prompts: Sequence[tuple[int, ...]], params: SamplingParams) -> Dialogue:
        """Episodes of several turns that begin with these prompts; those of a group stand together."""
        return RestartedDialogue(self, prompts, params)

    def log_probs(
        self, prompt: tuple[int, ...], completions: Sequence[Sequence[int]], params: SamplingParams
    ) -> list[list[float]] | None:
        """Log-probs of these completions of a prompt under the weights that it samples from, after temperature, by a pass that
        depends on nothing else; None where it has none that is exact.
        """
        return None

    def count(self) -> dict[str, Any]:
        """What it has counted, for the record of the run."""
        return {}

    def close(self) -> None:  # noqa: B027
        """Give back what it holds besides memory of this process; it samples no more."""

    def snapshot(self) -> Sampler:
        """A sampler of the trainer's weights of now: this one, after taking them over where it has a copy of its own. All
        processes that train together call it, before any of them samples.
        """
        return self


class NextTurn(NamedTuple):
    """What a turn is sampled from: the tokens that were heard since the last one, or, `anew`, all that the policy reads."""

    ids: Sequence[int]
    seed: int
    anew: bool = False


class Dialogue(ABC):
    """Episodes under way, by their place among the prompts."""

    joins: bool = False
    """Whether it takes `more`: turns of episodes that were answered meanwhile, which join those being sampled."""
    more: Callable[[], Mapping[int, NextTurn]] = dict

    @abstractmethod
    def turns(self, wanted: Mapping[int, NextTurn]) -> Iterator[tuple[int, Completion]]:
        """The next turn of the policy in these episodes, each as it ends. Others may be over, or be waiting for an answer."""


class RestartedDialogue(Dialogue):
    """A `Dialogue` of any sampler's: each turn is a completion of all that came before."""

    def __init__(self, sampler: Sampler, prompts: Sequence[tuple[int, ...]], params: SamplingParams) -> None:
        self.sampler, self.params = sampler, params
        self.contexts = [tuple(prompt) for prompt in prompts]

    def turns(self, wanted: Mapping[int, NextTurn]) -> Iterator[tuple[int, Completion]]:
        """See `Dialogue`. On the first turn a group shares its prompt, and ends together."""
        requests, owners = self._begin(wanted)
        for completed in self._steps(requests, owners):
            for place, completions in completed:
                for i, completion in zip(owners[place], completions, strict=True):
                    self.contexts[i] += completion.ids
                    yield i, completion

    def _begin(self, wanted: Mapping[int, NextTurn]) -> tuple[list[Request], list[list[int]]]:
        """Requests of these turns, and the episodes that each is of."""
        requests: list[Request] = []
        owners: list[list[int]] = []
        for i in sorted(wanted):
            ids, seed, anew = wanted[i]
            self.contexts[i] = (*(() if anew else self.contexts[i]), *ids)
            if requests and requests[-1].prompt_ids == self.contexts[i]:
                requests[-1] = Request(self.contexts[i], (*requests[-1].seeds, seed))
                owners[-1].append(i)
            else:
                requests.append(Request(self.contexts[i], (seed,)))
                owners.append([i])
        return requests, owners

    def _steps(self, requests: list[Request], owners: list[list[int]]) -> Iterator[list[tuple[int, list[Completion]]]]:
        """See `Sampler.steps`; `owners[place]` are the episodes whose turn a request is. Who adds requests adds their owners."""
        return self.sampler.steps(requests, self.params)


class ReplicaSampler(Sampler):
    """A sampler that runs a copy of the weights, which `refresh` brings up to date."""

    def __init__(self, inner: Sampler, refresh: Callable[[], None]) -> None:
        self.inner, self.exact, self._refresh = inner, inner.exact, refresh

    def steps(
        self, requests: list[Request], params: SamplingParams, cache: ActivationCache | None = None
    ) -> Iterator[list[tuple[int, list[Completion]]]]:
        """See `Sampler`; the trainer's cache knows other weights."""
        return self.inner.steps(requests, params)

    def dialogue(self, prompts: Sequence[tuple[int, ...]], params: SamplingParams) -> Dialogue:
        """See `Sampler`."""
        return self.inner.dialogue(prompts, params)

    def log_probs(
        self, prompt: tuple[int, ...], completions: Sequence[Sequence[int]], params: SamplingParams
    ) -> list[list[float]] | None:
        """See `Sampler`."""
        return self.inner.log_probs(prompt, completions, params)

    def snapshot(self) -> Sampler:
        """See `Sampler`."""
        self._refresh()
        return self

    def close(self) -> None:
        """See `Sampler`."""
        self.inner.close()


class Cut(NamedTuple):
    """That an environment's answer to a turn (0: its opening) was cut, or dropped, which ends the episode; and why."""

    turn: int
    kind: Literal["cut", "dropped"]
    reason: str


class Branch(NamedTuple):
    """That from token `start` of a completion on the policy read this prompt, in place of all that stands before."""

    start: int
    prompt_ids: tuple[int, ...]


class Stretch(NamedTuple):
    """Tokens of a completion, from its token `start` on, behind the prompt that they were sampled behind."""

    start: int
    prompt_ids: tuple[int, ...]
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Trajectory:
    """One scored completion of one prompt, ready for the mathematics and for `rollouts.jsonl`; or one episode of several turns,
    whose completion then holds the tokens of both sides; or one session of an agent, whose completion holds all its branches.
    """

    row: int
    k: int
    prompt_ids: tuple[int, ...]
    completion: Completion
    version: int
    text: str = ""
    reward: float | None = None
    status: str = "unscored"
    reason: str = ""
    parts: dict[str, Any] = field(default_factory=dict)
    mask: tuple[bool, ...] = ()
    """Which tokens the policy chose, in episodes of several turns; empty: all."""
    step_rewards: tuple[tuple[int, float], ...] = ()
    """(place, reward) of rewards that came before the end; they are part of `reward`."""
    turns: int = 1
    messages: tuple[dict[str, Any], ...] = ()
    """The conversation behind the prompt, in episodes of several turns."""
    cuts: tuple[Cut, ...] = ()
    """What an environment said and the policy was not shown, in such episodes."""
    policy_turns: tuple[str, ...] = ()
    """What the policy wrote, turn by turn, in such episodes; empty: `text` is its only turn."""
    teacher_prompt_ids: tuple[int, ...] = ()
    """What the reference reads in place of the prompt; empty: the prompt."""
    branches: tuple[Branch, ...] = ()
    """Where the policy read another past than what stands before: an agent asked so, or the chat template rewrote it. Empty:
    everything stands behind the prompt.
    """
    answer: str | None = None
    """The last answer of such a session, which is what rewards are shown behind a prompt that is text; None: `text`."""
    holders: tuple[int, ...] = ()
    """The ranks that have its tokens, where not all have (`spread.py`): that which made it, then those that it was sent to."""

    @property
    def home(self) -> int:
        """The rank that made it, or rank 0 where all have it."""
        return self.holders[0] if self.holders else 0

    @property
    def contexts(self) -> list[Stretch]:
        """The completion in the pieces that stand behind one prompt each; with no branches it is the only one."""
        starts = [Branch(0, self.prompt_ids), *self.branches]
        ends = [branch.start for branch in starts[1:]] + [len(self.completion.ids)]
        return [Stretch(at, prompt, self.completion.ids[at:end]) for (at, prompt), end in zip(starts, ends, strict=True)]

    @property
    def step_return(self) -> float:
        """The sum of the rewards that came before the end."""
        return math.fsum(reward for _, reward in self.step_rewards)

    @property
    def chosen(self) -> int:
        """The number of tokens that the policy chose."""
        return sum(self.mask) if self.mask else len(self.completion.ids)

    @property
    def policy_ids(self) -> tuple[int, ...]:
        """The tokens that the policy chose."""
        ids = self.completion.ids
        return tuple(itertools.compress(ids, self.mask)) if self.mask else ids


@dataclass(frozen=True)
class Collected:
    """Scored completions of one step: all of them, and the groups that are trained on."""

    trajectories: list[Trajectory]
    groups: list[list[Trajectory]]
    cursor: int
    entries: dict[str, int]
    """What became of the prompts, as the ledger has it."""

    def result(self) -> Collected:
        """Itself; a collection that another thread is at work on has to be waited for."""
        return self

    def to_json(self) -> str:
        """All of it as text, floats to their last digit."""
        place = {id(t): n for n, t in enumerate(self.trajectories)}
        groups = [[place[id(t)] for t in group] for group in self.groups]
        rest = {"groups": groups, "cursor": self.cursor, "entries": self.entries}
        own = [{name: x for name, x in asdict(t).items() if name != "holders"} for t in self.trajectories]
        return json.dumps({"trajectories": own, **rest})

    @classmethod
    def from_json(cls, text: str) -> Collected:
        """The inverse of `to_json`."""
        held = json.loads(text)
        trajectories = [trajectory_of(fields) for fields in held["trajectories"]]
        groups = [[trajectories[n] for n in group] for group in held["groups"]]
        return cls(trajectories, groups, held["cursor"], held["entries"])


ELSEWHERE = Collected([], [], 0, {})
"""Stands for a collection that another process has."""


class Pending(Protocol):
    """A collection that may still be under way."""

    def result(self) -> Collected:
        """Wait for it."""
        ...


def trajectory_of(held: dict[str, Any]) -> Trajectory:
    """A trajectory of its fields as JSON has them."""
    fields: dict[str, Any] = {name: tuple(x) if isinstance(x, list) else x for name, x in held.items()}
    written: dict[str, Any] = {name: tuple(x) if isinstance(x, list) else x for name, x in held["completion"].items()}
    fields["completion"] = Completion(**written)
    fields["step_rewards"] = tuple((place, reward) for place, reward in held.get("step_rewards", ()))
    fields["cuts"] = tuple(Cut(*cut) for cut in held.get("cuts", ()))
    branches = held.get("branches", ())
    fields["branches"] = tuple(Branch(start, tuple(ids) if isinstance(ids, list) else ids) for start, ids in branches)
    return Trajectory(**fields)
