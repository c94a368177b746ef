"""The bookkeeping of one engine's requests, for any number of callers: which completions are unsent, running or complete."""

from __future__ import annotations

import base64
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from psigrad.language.models.fused.caches import ActivationCache
from psigrad.language.rollout.types import Completion, Dialogue, Request, RestartedDialogue, Sampler, SamplingParams

Part = tuple[SamplingParams, list[tuple[int, list[int], int]]]
"""(sampling settings, [(number, prompt, seed)]) of completions to start."""


@dataclass(eq=False)
class Ticket:
    """The requests of one caller, identified by their index, and their completions so far."""

    params: SamplingParams
    requests: list[Request] = field(default_factory=list)
    written: list[dict[int, Completion]] = field(default_factory=list)
    complete: list[int] = field(default_factory=list)
    """The indices of the requests that are complete but that the caller has not taken yet."""
    left: int = 0
    """The number of requests that the caller has not taken yet."""

    def take(self) -> list[tuple[int, list[Completion]]]:
        """Return (index, completions) of the complete requests, each only once."""
        places, self.complete = self.complete, []
        self.left -= len(places)
        return [(place, [one for _, one in sorted(self.written[place].items())]) for place in places]


class Flight:
    """All unfinished completions of one engine. Any caller can add requests at any time. The class is not thread-safe."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._whose: dict[int, tuple[Ticket, int, int]] = {}
        self._unsent: list[int] = []
        self._dropped: list[int] = []

    @property
    def busy(self) -> bool:
        """True if a completion is unfinished, or if a cancellation must be sent to the engine."""
        return bool(self._whose or self._dropped)

    def add(self, ticket: Ticket, requests: Sequence[Request]) -> None:
        """Add requests to a caller's ticket, and queue their completions."""
        for request in requests:
            place = len(ticket.requests)
            ticket.requests.append(request)
            ticket.written.append({})
            ticket.complete += [] if request.seeds else [place]
            for k in range(len(request.seeds)):
                self._whose[number := next(self._numbers)] = ticket, place, k
                self._unsent.append(number)
        ticket.left += len(requests)

    def leave(self, ticket: Ticket) -> None:
        """Drop the unfinished requests of a caller."""
        gone = [number for number, (owner, _, _) in self._whose.items() if owner is ticket]
        for number in gone:
            del self._whose[number]
        unsent = set(self._unsent)
        self._dropped += [number for number in gone if number not in unsent]
        self._unsent = [number for number in self._unsent if number in self._whose]

    def news(self) -> tuple[list[Part], list[int]]:
        """Return (the new completions to start, the numbers of running ones to cancel), each only once."""
        parts: dict[SamplingParams, list[tuple[int, list[int], int]]] = {}
        for number in self._unsent:
            ticket, place, k = self._whose[number]
            request = ticket.requests[place]
            parts.setdefault(ticket.params, []).append((number, list(request.prompt_ids), request.seeds[k] % 2**63))
        dropped, self._unsent, self._dropped = self._dropped, [], []
        return list(parts.items()), dropped

    def land(self, number: int, ids: str, logprobs: str, why: str) -> None:
        """Store a finished completion for its caller."""
        if number not in self._whose:
            return
        ticket, place, k = self._whose.pop(number)
        seeds = ticket.requests[place].seeds
        ticket.written[place][k] = _completion(ids, logprobs, why, seeds[k], ticket.params)
        if len(ticket.written[place]) == len(seeds):
            ticket.complete.append(place)

    def begin_again(self) -> None:
        """Queue all unfinished completions again, for a new engine after the previous one was lost."""
        self._unsent, self._dropped = list(self._whose), []


class Snapshot(Sampler):
    """A sampler at the engine's current weights. It skips the check for changed weights, which reads all of them."""

    def __init__(self, whole: Any) -> None:
        self.whole = whole

    def steps(
        self, requests: list[Request], params: SamplingParams, cache: ActivationCache | None = None
    ) -> Iterator[list[tuple[int, list[Completion]]]]:
        """Sample with the engine's current weights. See `Sampler`."""
        steps: Iterator[list[tuple[int, list[Completion]]]] = self.whole.write(requests, params)
        return steps

    def dialogue(self, prompts: Sequence[tuple[int, ...]], params: SamplingParams) -> Dialogue:
        """Return episodes whose turns join the running completions. See `Sampler`."""
        return JoiningDialogue(self, prompts, params)


class JoiningDialogue(RestartedDialogue):
    """Episodes whose next turn joins the running completions as soon as the environment has answered.

    The previous turns of an episode are in the engine's prefix cache.
    """

    sampler: Snapshot
    joins = True

    def _steps(self, requests: list[Request], owners: list[list[int]]) -> Iterator[list[tuple[int, list[Completion]]]]:
        def more() -> list[Request]:
            joining, own = self._begin(self.more())
            owners.extend(own)
            return joining

        steps: Iterator[list[tuple[int, list[Completion]]]] = self.sampler.whole.write(requests, self.params, more)
        return steps


def settings_of(params: SamplingParams, stops: Iterable[int]) -> dict[str, Any]:
    """Return vLLM's sampling settings for psigrad's. `stops` are the model's stop tokens."""
    asked = {name: getattr(params, name) for name in ("max_tokens", "temperature", "top_p", "top_k", "min_p")}
    return {**asked, "stop_token_ids": sorted({*stops, *params.stop_token_ids})}


def _completion(ids: str, logprobs: str, why: str, seed: int, params: SamplingParams) -> Completion:
    """Return a completion, decoded from the pipe's text.

    At temperature 0, the engine reports log-probs at temperature 1, as psigrad's other samplers do.
    """
    tokens, own = tuple(numbers(ids, np.int32)), tuple(numbers(logprobs, np.float32))
    drawn = (0.0,) * len(own) if params.temperature == 0 else own
    return Completion(tokens, own, drawn, "stop" if why == "stop" else "length", seed)


def numbers(text: str, kind: Any) -> list[Any]:
    """Return numbers decoded from base64, in which the pipe sends them."""
    found: list[Any] = np.frombuffer(base64.b64decode(text), kind).tolist()
    return found
