"""The types of sampling: prompts, completions, trajectories, samplers. All use token ids. Texts are decoded from the ids."""

from __future__ import annotations

import itertools
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, overload

from psigrad.step import RunState

if TYPE_CHECKING:
    from psigrad.language.models.fused.caches import ActivationCache

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Prompt:
    """A prompt from the dataset: the `index` of its row, its token `ids`, and the `row` itself.

    The reference model reads `teacher_ids`, or `ids` if they are empty.
    """

    index: int
    ids: tuple[int, ...]
    row: Any
    teacher_ids: tuple[int, ...] = ()


class Prompts(Sequence[Prompt]):
    """Prompts that are created from dataset `rows` on access. For prompt i, `encoded[i]` is (index of its row, its token ids)."""

    def __init__(self, rows: Sequence[Any], encoded: Sequence[Any]) -> None:
        self.rows, self.encoded = rows, encoded

    def __len__(self) -> int:
        return len(self.encoded)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> list[Prompt]: ...
    def __getitem__(self, index: int | slice) -> Prompt | list[Prompt]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        row, ids = self.encoded[index]
        return Prompt(row, tuple(ids), self.rows[row])


@dataclass(frozen=True)
class Request:
    """One prompt, and one seed for each completion to sample. The group size is `len(seeds)`."""

    prompt_ids: tuple[int, ...]
    seeds: tuple[int, ...]


@dataclass(frozen=True)
class Completion:
    """One sampled completion.

    `sampling_logprobs[t]` is the log-probability of token t under the distribution that it was drawn from (after temperature,
    top-k, top-p, min-p). `logprobs[t]` is its log-probability after temperature only, as in training.
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    sampling_logprobs: tuple[float, ...]
    finish_reason: FinishReason
    seed: int
    experts: str = ""
    """The experts that the router chose for each token but the last, in base64 (`models/experts.py`); empty: not recorded."""
    prompt_experts: str = ""
    """The experts of the prompt's tokens, encoded in the same way."""


class DrawnToken(NamedTuple):
    """A sampled token with its log-probs (see `Completion`); `top` has the most probable ids with their log-probs."""

    id: int
    logprob: float
    sampling_logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class SamplingParams:
    """The distribution that tokens are drawn from, and the conditions that end a completion.

    Temperature, top_k, top_p and min_p are applied in this order, as in transformers. `temperature` 0 is greedy decoding.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    forbidden: tuple[int, ...] = ()
    """Tokens that are never drawn, such as the placeholder of an image. Another token is drawn in their place."""

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
        """True if top_p, top_k or min_p is set, so that the sampling distribution may differ from the policy's."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


class Sampler(ABC):
    """A sampler of completions: embedded, transformers, vLLM, or a custom one. `language/loading/samplers.py` creates it."""

    exact: bool = False
    """True if the sampler's log-probs equal those of the trainer's forward pass in float32, except for rounding. Training then
    need not recompute the old log-probs, even with several optimiser steps per batch.
    """

    engine: str = ""
    """The name and version of the program that draws tokens. Another version may draw other tokens from the same seeds."""

    central: bool = False
    """True if one process samples for all processes that train together; False if each process samples its share."""

    overlaps: bool = False
    """True if the sampler uses other devices than the trainer. In runs with a lag it may then sample during training steps."""

    @abstractmethod
    def steps(
        self, requests: list[Request], params: SamplingParams, cache: ActivationCache | None = None
    ) -> Iterator[list[tuple[int, list[Completion]]]]:
        """Sample the requests. After each decoding step, yield (index, completions) for each request that it completed.

        A sampler may store activations in `cache`, for training to reuse.
        """

    def sample(self, requests: list[Request], params: SamplingParams) -> list[list[Completion]]:
        """Return a list of completions for each request, in the order of its seeds."""
        done = dict(complete for step in self.steps(requests, params) for complete in step)
        return [done[place] for place in range(len(requests))]

    def dialogue(self, prompts: Sequence[tuple[int, ...]], params: SamplingParams) -> Dialogue:
        """Start an episode of several turns for each prompt. Prompts of the same group must be adjacent."""
        return RestartedDialogue(self, prompts, params)

    def log_probs(
        self, prompt: tuple[int, ...], completions: Sequence[Sequence[int]], params: SamplingParams
    ) -> list[list[float]] | None:
        """Return the log-prob of each token of the `completions`, under the sampler's weights and after temperature.

        The log-probs do not depend on other requests. Return None if the sampler cannot compute them exactly.
        """
        return None

    def count(self) -> dict[str, Any]:
        """Return the sampler's counters by name, for the records of the run."""
        return {}

    def close(self) -> None:  # noqa: B027
        """Release the sampler's resources, such as other processes. The sampler cannot be used afterwards."""

    def snapshot(self) -> Sampler:
        """Return a sampler with the trainer's current weights. If the sampler runs a copy of them, the copy is updated.

        All processes that train together call this method before any of them samples.
        """
        return self


class NextTurn(NamedTuple):
    """The request for an episode's next turn: its `seed`, and `ids`, the tokens to read before it.

    `ids` follow the episode's earlier tokens or, if `restart` is True, replace them.
    """

    ids: Sequence[int]
    seed: int
    restart: bool = False


class Dialogue(ABC):
    """Episodes of several turns that a sampler has started. An episode is identified by the index of its prompt."""

    joins: bool = False
    """True if `turns` repeatedly calls `more()` while it samples. It then also samples the turns that `more` returns."""
    more: Callable[[], Mapping[int, NextTurn]] = dict

    @abstractmethod
    def turns(self, next_turns: Mapping[int, NextTurn]) -> Iterator[tuple[int, Completion]]:
        """Sample one turn of each episode in `next_turns`, {episode: request}. Yield (episode, completion) as each turn ends."""


class RestartedDialogue(Dialogue):
    """A `Dialogue` for any sampler. Each turn is a new request, whose prompt consists of all earlier tokens of the episode."""

    def __init__(self, sampler: Sampler, prompts: Sequence[tuple[int, ...]], params: SamplingParams) -> None:
        self.sampler, self.params = sampler, params
        self.contexts = [tuple(prompt) for prompt in prompts]

    def turns(self, next_turns: Mapping[int, NextTurn]) -> Iterator[tuple[int, Completion]]:
        """Sample the next turns; see `Dialogue`. In the first turn, a group's episodes share one request."""
        requests, owners = self._begin(next_turns)
        for completed in self._steps(requests, owners):
            for place, completions in completed:
                for i, completion in zip(owners[place], completions, strict=True):
                    self.contexts[i] += completion.ids
                    yield i, completion

    def _begin(self, next_turns: Mapping[int, NextTurn]) -> tuple[list[Request], list[list[int]]]:
        """Return (the requests for these turns, each request's episodes). Adjacent episodes with equal tokens share a request."""
        requests: list[Request] = []
        owners: list[list[int]] = []
        for i in sorted(next_turns):
            ids, seed, restart = next_turns[i]
            self.contexts[i] = (*(() if restart else self.contexts[i]), *ids)
            if requests and requests[-1].prompt_ids == self.contexts[i]:
                requests[-1] = Request(self.contexts[i], (*requests[-1].seeds, seed))
                owners[-1].append(i)
            else:
                requests.append(Request(self.contexts[i], (seed,)))
                owners.append([i])
        return requests, owners

    def _steps(self, requests: list[Request], owners: list[list[int]]) -> Iterator[list[tuple[int, list[Completion]]]]:
        """Sample like `Sampler.steps`. `owners[i]` are request i's episodes. A subclass may append to both lists."""
        return self.sampler.steps(requests, self.params)


class ReplicaSampler(Sampler):
    """A sampler that runs a copy of the policy's weights. `refresh()` copies the current weights into it."""

    def __init__(self, inner: Sampler, refresh: Callable[[], None]) -> None:
        self.inner, self.exact, self.engine, self._refresh = inner, inner.exact, inner.engine, refresh

    def steps(
        self, requests: list[Request], params: SamplingParams, cache: ActivationCache | None = None
    ) -> Iterator[list[tuple[int, list[Completion]]]]:
        """Sample with this sampler's copy of the weights; see `Sampler`. `cache` stays empty: training may use newer weights."""
        return self.inner.steps(requests, params)

    def dialogue(self, prompts: Sequence[tuple[int, ...]], params: SamplingParams) -> Dialogue:
        """Start episodes whose turns are sampled with this sampler's copy of the weights; see `Sampler`."""
        return self.inner.dialogue(prompts, params)

    def log_probs(
        self, prompt: tuple[int, ...], completions: Sequence[Sequence[int]], params: SamplingParams
    ) -> list[list[float]] | None:
        """Return log-probs under this sampler's copy of the weights; see `Sampler`."""
        return self.inner.log_probs(prompt, completions, params)

    def snapshot(self) -> Sampler:
        """Copy the policy's current weights, and return this sampler; see `Sampler`."""
        self._refresh()
        return self

    def close(self) -> None:
        """Close the inner sampler; see `Sampler`."""
        self.inner.close()


class Cut(NamedTuple):
    """An environment's text that was too long. It was shortened ("cut"), or the episode ended without it ("dropped").

    `turn` is the number of policy turns before it.
    """

    turn: int
    kind: Literal["cut", "dropped"]
    reason: str


class Branch(NamedTuple):
    """A change of context: before token `start` of a completion, `prompt_ids` replaced all tokens that the policy had read."""

    start: int
    prompt_ids: tuple[int, ...]


class CompletionSpan(NamedTuple):
    """The tokens `ids` of a completion from index `start` to the next `Branch`. Before them, the policy read `prompt_ids`."""

    start: int
    prompt_ids: tuple[int, ...]
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Trajectory:
    """One completion of one prompt, with its reward.

    It is completion number `k`, from 0, for the dataset row with index `row`. The policy sampled it after `version` training
    steps. In an episode of several turns, the completion has the tokens of the policy and of the environment.
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
    """True for the tokens that the policy chose, in episodes of several turns; empty: all."""
    step_rewards: tuple[tuple[int, float], ...] = ()
    """(token index, reward) of each reward for a step inside the completion. Their sum is part of `reward`."""
    turns: int = 1
    messages: tuple[dict[str, Any], ...] = ()
    """The conversation after the prompt, in episodes of several turns."""
    cuts: tuple[Cut, ...] = ()
    """The environment's texts that were shortened or removed, in episodes of several turns."""
    policy_turns: tuple[str, ...] = ()
    """The policy's text, turn by turn, in episodes of several turns; empty: `text` is its only turn."""
    teacher_prompt_ids: tuple[int, ...] = ()
    """The prompt that the reference model reads; empty: it reads `prompt_ids`."""
    branches: tuple[Branch, ...] = ()
    """The changes of context: an agent sent a different prompt, or the chat template changed earlier turns.

    Empty: all tokens follow the prompt.
    """
    seat: int | None = None
    """In a game of several players (seats): the seat whose turns the trajectory has."""
    answer: str | None = None
    """The last answer of an agent's session, which rewards receive if the prompt is text. None: rewards receive `text`."""
    holders: tuple[int, ...] = ()
    """The ranks that have the tokens (`exchange.py`): first the rank that sampled them, then the receivers; empty: all."""

    @property
    def source_rank(self) -> int:
        """The rank that records the trajectory: rank 0 if all ranks have its tokens, otherwise the rank that sampled it."""
        return self.holders[0] if self.holders else 0

    @property
    def contexts(self) -> list[CompletionSpan]:
        """The completion in parts, split at its `branches`. Each part has the prompt that the policy read before it."""
        starts = [Branch(0, self.prompt_ids), *self.branches]
        ends = [branch.start for branch in starts[1:]] + [len(self.completion.ids)]
        return [CompletionSpan(at, prompt, self.completion.ids[at:end]) for (at, prompt), end in zip(starts, ends, strict=True)]

    @property
    def step_return(self) -> float:
        """The sum of the rewards in `step_rewards`."""
        return math.fsum(reward for _, reward in self.step_rewards)

    @property
    def num_chosen(self) -> int:
        """The number of tokens that the policy chose."""
        return sum(self.mask) if self.mask else len(self.completion.ids)

    @property
    def policy_ids(self) -> tuple[int, ...]:
        """The tokens that the policy chose."""
        ids = self.completion.ids
        return tuple(itertools.compress(ids, self.mask)) if self.mask else ids


@dataclass(frozen=True)
class Collected:
    """The trajectories of one step, and the groups to train on. `cursor` is the number of prompts drawn in the run so far."""

    trajectories: list[Trajectory]
    groups: list[list[Trajectory]]
    cursor: int
    entries: dict[str, int]
    """The number of prompts drawn, trained on, and dropped for each reason; the ledger (`online/collect.py`) adds them up."""

    def result(self) -> Collected:
        """Return this collection. The protocol `Pending` requires this method."""
        return self

    def to_json(self) -> str:
        """Return the collection as JSON, with floats in full precision and without `Trajectory.holders`."""
        place = {id(t): n for n, t in enumerate(self.trajectories)}
        groups = [[place[id(t)] for t in group] for group in self.groups]
        rest = {"groups": groups, "cursor": self.cursor, "entries": self.entries}
        own = [{name: x for name, x in asdict(t).items() if name != "holders"} for t in self.trajectories]
        return json.dumps({"trajectories": own, **rest})

    @classmethod
    def from_json(cls, text: str) -> Collected:
        """Return the collection from the text that `to_json` returned."""
        held = json.loads(text)
        trajectories = [trajectory_of(fields) for fields in held["trajectories"]]
        groups = [[trajectories[n] for n in group] for group in held["groups"]]
        return cls(trajectories, groups, held["cursor"], held["entries"])


ELSEWHERE = Collected([], [], 0, {})
"""An empty collection, which stands for rank 0's collection on ranks that do not sample."""


class Pending(Protocol):
    """A `Collected` that another thread may still be sampling or scoring."""

    def result(self) -> Collected:
        """Wait for the collection and return it."""


def trajectory_of(values: dict[str, Any]) -> Trajectory:
    """Return the trajectory with these fields, as read from JSON. Lists become tuples."""
    fields: dict[str, Any] = {name: tuple(x) if isinstance(x, list) else x for name, x in values.items()}
    written: dict[str, Any] = {name: tuple(x) if isinstance(x, list) else x for name, x in values["completion"].items()}
    fields["completion"] = Completion(**written)
    fields["step_rewards"] = tuple((place, reward) for place, reward in values.get("step_rewards", ()))
    fields["cuts"] = tuple(Cut(*cut) for cut in values.get("cuts", ()))
    branches = values.get("branches", ())
    fields["branches"] = tuple(Branch(start, tuple(ids) if isinstance(ids, list) else ids) for start, ids in branches)
    return Trajectory(**fields)


@dataclass(frozen=True)
class State(RunState):
    """The values of a run that change from step to step, except the weights and the optimiser's moments."""

    cursor: int = 0
    """The number of prompts (online) or rows (SFT) drawn from the endless sequence of shuffled epochs."""
    algorithm: dict[str, float] = field(default_factory=dict)
    """The `PolicyGradient`'s own state by name, such as a moving-average baseline or an adaptive KL coefficient."""
    ledger: dict[str, int] = field(default_factory=dict)
    """In online runs: the numbers of prompts drawn so far, trained on, pending, and dropped, by name (`online/collect.py`)."""
    pending: tuple[Pending, ...] = ()
    """In runs with a lag: the collections for later steps that have already started."""
    unscored: list[list[int]] = field(default_factory=list)
    """[number unscored through a fault, number of completions] of each of the last steps; see `scoring.check_unscored`."""
