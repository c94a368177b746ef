"""Reward models as scorers, alone or added to reward functions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from psigrad.data.batches import pack_by_tokens
from psigrad.data.rows import Row
from psigrad.data.templates import example
from psigrad.models.packing import Groups, Ids
from psigrad.models.scalar_model import ScalarModel
from psigrad.rewards import Failed, Result, Scored, Scorer, Unscored


@dataclass(frozen=True)
class ModelScorer:
    """A reward model as a `Scorer`.

    `same_tokens` says that it reads the policy's own tokens: then what was sampled is what is scored, token for token. Else
    prompt and completion are written in the reward model's own template.
    """

    name: str
    model: ScalarModel
    same_tokens: bool
    micro_batch_tokens: int = 16384

    def score(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Ids],
        columns: dict[str, list[Any]],
        groups: Sequence[int] | None = None,
        prompt_ids: Sequence[Ids] | None = None,
    ) -> list[Result]:
        """The model's score of every completion."""
        if self.same_tokens and prompt_ids is not None:
            pairs = list(zip(prompt_ids, completion_ids, strict=True))
        else:
            pairs = [self._encoded(prompt, text) for prompt, text in zip(prompts, completions, strict=True)]
        return [self._result(value) for value in score_all(self.model, pairs, self.micro_batch_tokens)]

    def _encoded(self, prompt: Any, completion: Any) -> tuple[Ids, Ids]:
        return [], example(self.model.tokenizer, Row("a completion", prompt=prompt, completion=completion)).ids

    def _result(self, value: float) -> Result:
        if not math.isfinite(value):
            return Unscored(f"the reward model {self.name} said {value}")
        return Scored(value, {self.name: value})


@torch.no_grad()
def score_all(model: ScalarModel, pairs: Sequence[tuple[Ids, Ids]], budget: int) -> list[float]:
    """The score of every (prompt, completion), in forward passes of at most `budget` tokens; equal prompts that stand next to one
    another are computed once.
    """
    scores = [0.0] * len(pairs)
    for part in pack_by_tokens([len(p) + len(c) for p, c in pairs], budget):
        prompts: list[Ids] = []
        completions: list[list[Ids]] = []
        for i in part:
            prompt, completion = pairs[i]
            if not prompt:  # a text that is not split: its first token stands for the prompt
                prompt, completion = completion[:1], completion[1:]
            if not prompts or list(prompts[-1]) != list(prompt):
                prompts.append(prompt)
                completions.append([])
            completions[-1].append(completion)
        for i, value in zip(part, model.scores(Groups(prompts, completions)).tolist(), strict=True):
            scores[i] = value
    return scores


@dataclass(frozen=True)
class Mixture:
    """Several scorers whose weighted results are added; a completion that one of them cannot score stays unscored."""

    scorers: Sequence[Scorer]
    weights: Sequence[float]

    def score(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Ids],
        columns: dict[str, list[Any]],
        groups: Sequence[int] | None = None,
        prompt_ids: Sequence[Ids] | None = None,
    ) -> list[Result]:
        """One result per completion, in order; see `Scorer`."""
        given = [s.score(prompts, completions, completion_ids, columns, groups, prompt_ids) for s in self.scorers]
        return [self._added(results) for results in zip(*given, strict=True)]

    def _added(self, results: Sequence[Result]) -> Result:
        total, parts, fault = 0.0, {}, None
        for result, weight in zip(results, self.weights, strict=True):
            if isinstance(result, Unscored):
                return result
            parts |= result.parts
            total += weight * result.value
            fault = fault or (result if isinstance(result, Failed) else None)
        return Scored(total, parts) if fault is None else Failed(fault.value, fault.reason, parts)
