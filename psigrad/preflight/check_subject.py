"""What `psigrad check` looks at, a model with prompts and completions of its own, and what a check comes to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from psigrad.config import OnlineConfig
from psigrad.errors import UserError
from psigrad.language.data.dataset_rows import Row
from psigrad.language.data.sources import from_rows, read_rows
from psigrad.language.data.templates import prompt_ids
from psigrad.language.loading.load_model import load_model
from psigrad.language.models.language_model import LanguageModel
from psigrad.language.models.packing import Groups
from psigrad.language.recipes.conversation import offered
from psigrad.language.rollout.samplers import samplers
from psigrad.language.rollout.types import Request, Sampler, SamplingParams, Trajectory
from psigrad.language.training.online.ledger import Prompt

# Prompts that are looked at, completions of each, and the most tokens of one.
PROMPTS, COMPLETIONS, TOKENS = 4, 3, 24
TEXTS = ("The capital of France is", "2 + 2 =", "Once upon a time there was a little", "def add(a, b):")
# Mean difference of log-probs in nats, and of gradients as a share of their norm. Sums in another order differ by about 1e-6 in
# float32; bfloat16 has 8 bits, and a deep network adds their rounding up.
BOUNDS = {torch.float32: (1e-4, 1e-3), torch.bfloat16: (5e-2, 2e-1)}


@dataclass(frozen=True)
class Finding:
    """What one check came to."""

    name: str
    what: str
    value: float
    bound: float
    control: float
    """The value under a planted fault."""
    seconds: float = 0.0
    note: str = ""

    @property
    def verdict(self) -> str:
        """ok; failed; or unproven, where the planted fault stays within the bound."""
        if not self.value <= self.bound:
            return "failed"
        return "ok" if self.control > self.bound else "unproven"

    def row(self) -> dict[str, Any]:
        """As JSON: name, what, value, bound, control, verdict, seconds, note."""
        about = {"name": self.name, "what": self.what, "value": self.value, "bound": self.bound, "control": self.control}
        return {**about, "verdict": self.verdict, "seconds": round(self.seconds, 3), "note": self.note}


@dataclass
class Subject:
    """The model with prompts and completions of its own."""

    config: OnlineConfig
    model: LanguageModel
    sampler: Sampler
    params: SamplingParams
    dataset: list[Prompt]
    prompts: list[Prompt]
    trajectories: list[list[Trajectory]]

    @property
    def groups(self) -> Groups:
        """The completions by their prompts."""
        completions = [[t.completion.ids for t in group] for group in self.trajectories]
        return Groups([group[0].prompt_ids for group in self.trajectories], completions)

    @property
    def alone(self) -> list[tuple[Sequence[int], Sequence[int]]]:
        """Every completion with its prompt."""
        return [(t.prompt_ids, t.completion.ids) for group in self.trajectories for t in group]

    @property
    def bounds(self) -> tuple[float, float]:
        """Of log-probs and of gradients."""
        return BOUNDS.get(self.model.network.dtype, BOUNDS[torch.bfloat16])

    @torch.no_grad()
    def logp(self, groups: Groups, **how: Any) -> list[Tensor]:
        """The log-probs of each completion."""
        found = self.model.evaluate(groups, **how).logp
        lengths = [len(ids) for group in groups.completions for ids in group]
        return [row[:length] for row, length in zip(found, lengths, strict=True)]


def _rows(config: OnlineConfig) -> list[Row]:
    if config.data.dataset:
        return read_rows(config.data, "prompt-only", 0, config.run.seed)[0]
    return from_rows([{"prompt": text} for text in TEXTS], "prompt-only").rows


def subject_of(config: OnlineConfig) -> Subject:
    """The model, and completions that it samples with the run's own settings, shortened."""
    model = load_model(config.model, config.run, None)
    short = replace(config.sampling, max_completion_length=min(TOKENS, config.sampling.max_completion_length))
    dataset = [Prompt(i, tuple(prompt_ids(model.tokenizer, row)), row) for i, row in enumerate(offered(config, _rows(config)))]
    room = model.max_length - short.max_completion_length
    prompts = sorted((p for p in dataset if 0 < len(p.ids) <= room), key=lambda p: len(p.ids))[:PROMPTS]
    if len(prompts) < 2:
        raise UserError("The dataset has fewer than two prompts that fit into the model; give some more.")
    params = samplers.sampling_params(short, model, [p.row for p in prompts])
    sampler = samplers.make(config.sampling, model)
    # lengths of their own, so that padding and packing have something to get wrong
    groups = []
    for place, prompt in enumerate(prompts):
        request = Request(prompt.ids, tuple(range(100 * place, 100 * place + COMPLETIONS)))
        (completions,) = sampler.sample([request], replace(params, max_tokens=max(2, params.max_tokens - 3 * place)))
        groups.append([Trajectory(prompt.index, k, prompt.ids, c, 0) for k, c in enumerate(completions)])
    return Subject(config, model, sampler, params, dataset, prompts, groups)
