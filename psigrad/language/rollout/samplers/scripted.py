"""A sampler without a model: a script says what is completed. For tests and for replaying recorded completions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from psigrad.language.rollout.types import Completion, FinishReason, Request, Sampler, SamplingParams


class ScriptedSampler(Sampler):
    """`script(prompt_ids, seed)` gives the token ids of a completion and their log-probs; it ends at the first stop token or at
    `max_tokens`, as any sampler's does.
    """

    def __init__(
        self, script: Callable[[tuple[int, ...], int], tuple[list[int], list[float]]], eos_token_ids: tuple[int, ...] = ()
    ) -> None:
        self.script, self.eos_token_ids = script, eos_token_ids

    def steps(
        self, requests: list[Request], params: SamplingParams, cache: Any = None
    ) -> Iterator[list[tuple[int, list[Completion]]]]:
        """See `Sampler`: one request after the other."""
        for place, request in enumerate(requests):
            yield [(place, [self._complete(request.prompt_ids, seed, params) for seed in request.seeds])]

    def _complete(self, prompt_ids: tuple[int, ...], seed: int, params: SamplingParams) -> Completion:
        ids, logprobs = self.script(prompt_ids, seed)
        stops = {*self.eos_token_ids, *params.stop_token_ids}
        end = next((t + 1 for t, token in enumerate(ids) if token in stops), len(ids) + 1)
        count = min(end, len(ids), params.max_tokens)
        reason: FinishReason = "stop" if count and ids[count - 1] in stops else "length"
        kept = tuple(logprobs[:count])
        return Completion(tuple(ids[:count]), kept, kept, reason, seed)
